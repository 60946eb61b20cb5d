"""Loads a model with transformers, with attention that is ours.

`transformers_backend.py` calls `load` once. What transformers raises is a refusal with its own words.

What must always hold: nothing is fetched, and no code of the checkpoint is run unless it is trusted; a checkpoint that
lacks a tensor, or has one of another shape, is refused: transformers would make one up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from ..backend import BackendConfig
from ..checkpoints.progress import Progress
from ..kv_cache_size import check_weights_fit
from ..machine import memory
from ..models.config import read_config
from ..models.families import SPELLINGS
from .paged_attention import PagedAttention
from .served_models import SEEING, Seeing, check_class, check_config
from .transformers_settings import check_installed, check_settings, dtype_of, settle_environment

_SHOWN_NAMES = 3
_log = logging.getLogger(__name__)


@attrs.frozen(eq=False)
class Loaded:
    """A model on its device, whose attention is `attention`."""

    model: Any
    attention: PagedAttention
    named: str
    """Its architecture."""
    dtype: torch.dtype
    weights: str
    """Their format, as `Capabilities.weights`."""
    library: str
    device: torch.device

    @property
    def seeing(self) -> Seeing | None:
        """How the model reads images; None: it reads none."""
        return SEEING.get(self.named)

    @property
    def whole_images(self) -> bool:
        """Whether the tokens of an image attend to one another in both directions."""
        return self.seeing is not None and self.seeing.whole_images

    def attend_with(self, attention: str) -> None:
        """Change the attention function of the decoder."""
        self.model.set_attn_implementation(attention if self.seeing is None else {"text_config": attention})

    @property
    def num_bytes(self) -> int:
        """Of all weights, and of tables that are no weights."""
        tensors = {tensor.data_ptr(): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        return sum(tensor.nbytes for tensor in tensors.values())


def load(config: BackendConfig) -> Loaded:
    """Load the model. Raises ValueError without transformers, and for a model or a setting that is not served."""
    found = check_installed()
    check_settings(config)
    config_json = read_config(config.model_path)
    listed = config_json.get("architectures") or []
    if len(listed) != 1:
        raise ValueError(f"config.json names {len(listed)} architectures; the transformers executor needs one")
    named = SPELLINGS.get(str(listed[0]), str(listed[0]))
    settle_environment()
    model_config = _read_config(config, named)
    check_config(model_config, named, config.max_model_len)
    attention = PagedAttention()
    dtype: torch.dtype = getattr(torch, dtype_of(config))
    with _words_of_its_own(named, config):
        model = _make(model_config, "eager", dtype, config, named, device="meta")
    check_class(model, named)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _read(config, model_config, attention, dtype, named).eval().requires_grad_(False).to(device)
    quantized = config_json.get("quantization_config") or {}
    return Loaded(
        model=model,
        attention=attention,
        named=named,
        dtype=dtype,
        weights=str(quantized.get("quant_method") or str(dtype).removeprefix("torch.")),
        library=f"transformers {found} on {device.type}",
        device=device,
    )


def _read_config(config: BackendConfig, named: str) -> Any:
    from transformers import AutoConfig

    with _words_of_its_own(named, config):
        return AutoConfig.from_pretrained(
            config.model_path, trust_remote_code=config.trust_remote_code, local_files_only=True
        )


def _models_like(named: str) -> Any:
    """Return what makes models of such architectures; transformers does not type all of it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if named in SEEING else AutoModelForCausalLM


def _for_decoder(attention: str, named: str) -> Any:
    """Return what transformers is told of an attention function that is the decoder's alone."""
    return {"": "eager", "text_config": attention, "vision_config": "sdpa"} if named in SEEING else attention


def _make(model_config: Any, attention: str, dtype: torch.dtype, config: BackendConfig, named: str, device: str) -> Any:
    """Make the model with random weights, or none of them on the device `meta`."""
    with torch.device(device):
        return _models_like(named).from_config(
            model_config,
            dtype=dtype,
            attn_implementation=_for_decoder(attention, named),
            trust_remote_code=config.trust_remote_code,
        )


def _read(config: BackendConfig, model_config: Any, attention: PagedAttention, dtype: torch.dtype, named: str) -> Any:
    if config.load_format == "dummy":
        torch.manual_seed(0)
        with _words_of_its_own(named, config):
            return _make(model_config, attention.name, dtype, config, named, device="cpu")
    num_stored = sum(file.stat().st_size for file in config.model_path.glob("*.safetensors"))
    if num_stored == 0:
        raise ValueError(f"{config.model_path} has no safetensors, which is all that the transformers executor reads")
    check_weights_fit(num_stored, memory(), num_sharing=config.num_sharing, share=config.memory_share)
    with _words_of_its_own(named, config), _shown_progress():
        model, told = _models_like(named).from_pretrained(
            config.model_path,
            config=model_config,
            dtype=dtype,
            attn_implementation=_for_decoder(attention.name, named),
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    if told["missing_keys"]:
        raise ValueError(f"the checkpoint lacks tensor {_some(told['missing_keys'])}")
    if told["mismatched_keys"]:
        raise ValueError(f"the checkpoint has tensors of other shapes: {_some(told['mismatched_keys'])}")
    if told["unexpected_keys"]:
        _log.warning("transformers does not use these tensors of the checkpoint: %s", _some(told["unexpected_keys"]))
    return model


def _some(names: Sequence[object]) -> str:
    shown = sorted(map(str, names))
    more = f" and {len(shown) - _SHOWN_NAMES} others" if len(shown) > _SHOWN_NAMES else ""
    return ", ".join(shown[:_SHOWN_NAMES]) + more


@contextmanager
def _words_of_its_own(named: str, config: BackendConfig) -> Iterator[None]:
    """Turn what transformers raises, or a library that it needs, into a refusal."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # of the library, of code in a checkpoint, of a reader of some format
        hint = "" if config.trust_remote_code else _trust_hint(str(error))
        raise ValueError(f"transformers cannot load {named}: {str(error).strip() or repr(error)}{hint}") from error


def _trust_hint(message: str) -> str:
    return " (--trust-remote-code)" if "trust_remote_code" in message else ""


@contextmanager
def _shown_progress() -> Iterator[None]:
    """Show how many tensors are loaded, as other executors show bytes, in the place of transformers' own bars."""
    from transformers.utils import logging as library_logging

    def make(factory: Callable[..., Any], args: Any, named: Any) -> Any:
        if named.get("desc") != "Loading weights" or not args:
            return factory(*args, **named, disable=True)
        return _counted(args[0])

    before = library_logging.set_tqdm_hook(make)
    try:
        yield
    finally:
        library_logging.set_tqdm_hook(before)


def _counted(tensors: Any) -> Iterator[Any]:
    progress = Progress("loading weights", len(tensors), "tensors")
    try:
        for tensor in tensors:
            yield tensor
            progress.advance(1)
    finally:
        progress.remove()
