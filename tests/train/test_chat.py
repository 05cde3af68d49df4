"""Where a template puts the user's words, and how many BOS it takes."""

import pytest

from specdeft.errors import SpecdeftError
from specdeft.train.chat import chat_format, encode_prompt
from tests.toy_tokenizer import toy_tokenizer

BODY = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}"
ASK = "{% if add_generation_prompt %}assistant:{% endif %}"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_template_with_bos_gives_exactly_one(adds_bos):
    tokenizer = toy_tokenizer(adds_bos, "{{ bos_token }}" + BODY + ASK)
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "hi there"}])
    assert ids.count(1) == 1
    assert ids[0] == 1
    form = chat_format(tokenizer)
    assert tokenizer.decode(form.user_prefix) == "<bos>user:"
    assert list(form.user_prefix) == ids[: len(form.user_prefix)]
    assert form.stop_ids == (2,)


def test_a_template_without_bos_gives_what_transformers_gives():
    tokenizer = toy_tokenizer(True, BODY + ASK)
    turn = [{"role": "user", "content": "hi"}]
    wanted = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    assert encode_prompt(tokenizer, turn) == wanted


def test_no_template_is_an_error_with_the_way_out():
    with pytest.raises(
        SpecdeftError, match=r"has no chat template: set tokenizer\.chat_template, .*--chat-template FILE"
    ):
        chat_format(toy_tokenizer(True, None))


def test_a_template_that_drops_the_users_words_is_refused():
    with pytest.raises(SpecdeftError, match="0 times"):
        chat_format(toy_tokenizer(False, "<bos>assistant:"))
