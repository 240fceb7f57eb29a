"""Anthropic's Messages: bodies, answers, streams and errors, over the path that chat completions take."""
