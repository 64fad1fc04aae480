"""The model's tokenizer, for one thread at a time."""

from __future__ import annotations

import copy
import threading
from typing import Any

from daric_rag.one_process import OneProcess


class ExclusiveTokenizer(OneProcess):
    """A private copy of a tokenizer, safe to call from any thread.

    Whether control tokens in a text count is a switch inside the tokenizer (`encode_special_tokens`), which each
    call sets before it reads the text. With two threads at once, or with somebody else's call on the same object,
    a control token in a document could become live.
    """

    kind = "tokenizer"

    def __init__(self, tokenizer: Any) -> None:
        self.check_process()
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()

    def __call__(self, text: str, **options: Any) -> Any:
        """What the tokenizer makes of a text."""
        self.check_process()
        with self._lock:
            return self._tokenizer(text, **options)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """What the tokenizer's chat template makes of messages."""
        self.check_process()
        with self._lock:
            return self._tokenizer.apply_chat_template(messages, **options)
