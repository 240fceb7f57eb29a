"""Chat templates as `tokenizer_config.json` states them: one, or several by name."""

from __future__ import annotations

from collections.abc import Mapping


def stated_template(stated: object) -> str | None:
    """Returns one template for what a tokenizer's config has as `chat_template`; None without one for chat.

    Of several by name, transformers takes `tool_use` for conversations with tools and `default` for others.
    So does the template that is returned.
    """
    if not isinstance(stated, list):
        return stated if isinstance(stated, str) else None
    named = {each.get("name"): each.get("template") for each in stated if isinstance(each, Mapping)}
    default, with_tools = named.get("default"), named.get("tool_use")
    if not isinstance(default, str) or not isinstance(with_tools, str):
        return default if isinstance(default, str) else None
    # By itself, a template ends before the line end that it may have.
    return (
        "{% if tools %}"
        + with_tools.removesuffix("\n")
        + "{% else %}"
        + default.removesuffix("\n")
        + "{% endif %}"
    )
