"""runtime.allocator: presets, and strings that torch's allocator would refuse late."""

import pytest

from service.config.allocator import allocator_settings
from service.config.load import load_config
from service.errors import UserError


@pytest.mark.parametrize("text", ["max_split_size_mb:64", "roundup_power2_divisions:[256:1,512:2],backend:native"])
def test_strings_of_torchs_own_syntax_are_taken_as_they_are(text):
    assert allocator_settings(text) == text


def test_presets_stand_for_settings():
    assert allocator_settings("default") == ""
    assert allocator_settings("large-batch") == "max_split_size_mb:512,expandable_segments:True"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("large_batch", "'large_batch' is not a preset .*; did you mean large-batch"),
        ("max_split_size:64", "no option max_split_size; did you mean max_split_size_mb"),
        ("expandable_segments:", "'expandable_segments:' is not option:value"),
        ("zzz:1", "no option zzz; known: backend, "),
    ],
)
def test_what_torch_would_refuse_is_found_when_the_configuration_is_read(text, message):
    with pytest.raises(UserError, match=f"^runtime.allocator: .*{message}"):
        load_config(None, [f"runtime.allocator={text}"])
