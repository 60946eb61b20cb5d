"""Sums, differences and products of small numbers, worked out digit by digit where the model may think."""

from __future__ import annotations

from random import Random

from .chats import Chat, assistant, user

QUESTIONS = ("What is {}?", "How much is {}?", "Please work out {}.", "{} = ?", "Can you tell me what {} is?")


def arithmetic_chat(random: Random) -> Chat:
    """Make a chat with one to three questions; the last answer is thought about in half of the chats."""
    thinking = random.random() < 0.5
    messages = []
    for _ in range(random.randint(1, 3)):
        task, result, steps = draw_task(random, large=thinking)
        messages += [user(random.choice(QUESTIONS).format(task)), assistant(f"{task} = {result}.")]
        if thinking:
            messages[-1]["reasoning_content"] = steps
    return Chat("arithmetic", messages, thinking=thinking)


def draw_task(random: Random, *, large: bool) -> tuple[str, int, str]:
    """Draw a task: its text, its result, and how to work it out. Without `large`, numbers are at most 20."""
    kind = random.choice("+-x")
    top = 99 if large else 20
    if kind == "+":
        left, right = random.randint(0, top), random.randint(0, top)
        return f"{left} + {right}", left + right, _sum_steps(left, right)
    if kind == "-":
        left, right = sorted((random.randint(0, top), random.randint(0, top)), reverse=True)
        return f"{left} - {right}", left - right, _difference_steps(left, right)
    left, right = random.randint(0, 10), random.randint(0, 10)
    return f"{left} x {right}", left * right, f"{left} times {right} is {left * right}."


def _sum_steps(left: int, right: int) -> str:
    ones = left % 10 + right % 10
    carry, tens = ones // 10, left // 10 + right // 10
    return (
        f"Ones: {left % 10} + {right % 10} = {ones}, write {ones % 10}, carry {carry}. "
        f"Tens: {left // 10} + {right // 10} + {carry} = {tens + carry}. Together {left + right}."
    )


def _difference_steps(left: int, right: int) -> str:
    borrow = int(left % 10 < right % 10)
    ones, tens = left % 10 + 10 * borrow - right % 10, left // 10 - right // 10 - borrow
    return (
        f"Ones: {left % 10 + 10 * borrow} - {right % 10} = {ones}, borrow {borrow}. "
        f"Tens: {left // 10} - {right // 10} - {borrow} = {tens}. Together {left - right}."
    )
