"""What is told of requests beside their answers: logs, traces, the lag of the event loop."""
