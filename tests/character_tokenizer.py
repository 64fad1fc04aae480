"""A tokenizer without files, for tests of chunk layouts."""


class CharacterTokenizer:
    """Tokens are characters."""

    chat_template = "yes"

    def __call__(self, text, **options):
        return {"input_ids": [ord(character) for character in text]}

    def apply_chat_template(self, messages, tools, tokenize, add_generation_prompt):
        return (
            "".join(f"[{message['role']}]{message['content']}[end]" for message in messages) + "[assistant]"
        )
