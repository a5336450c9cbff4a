"""Engine profiles: what is shipped loads, and a bad file is refused by file, key and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.engine_cost import ProfileError, StepCosts, parse_profile
from sim.profiles import load_profile, profile_names

GOOD = (Path(__file__).parents[2] / "sim/profiles/tiny-cpu.yaml").read_text(encoding="utf-8")


def test_the_shipped_profiles_load_and_carry_their_file_name() -> None:
    assert profile_names() == ("qwen3-0.6b-rtx4090", "tiny-cpu")
    for name in profile_names():
        assert load_profile(name).name == name


def test_decimal_numbers_arrive_exactly() -> None:
    text = GOOD.replace("decode_step_base: {value: 2, unit: ms", "decode_step_base: {value: 2.0145, unit: ms")
    assert parse_profile(text, "t").decode_base_ps == 2_014_500_000


def test_a_profile_may_be_named_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace("name: tiny-cpu", "name: mine"), encoding="utf-8")
    assert load_profile(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "startup: {value: 2, unit: s,",
            "startup: {value: 2, unit: parsecs,",
            r"parameters.startup: unit 'parsecs'; must be one of",
        ),
        (
            "startup: {value: 2,",
            "startup: {value: -2,",
            r"parameters.startup: value -2; must be finite and not negative",
        ),
        ("startup: {value: 2,", "startup: {value: soon,", r"parameters.startup: value 'soon' is not a number"),
        (
            "startup: {value: 2, unit: s, origin: assumed}",
            "startup: {value: 2, unit: s, origin: guessed}",
            r"origin 'guessed'",
        ),
        ("  startup:", "  start_up:", r"unknown parameter 'start_up'"),
        (
            "kv_capacity: {value: 4096",
            "kv_capacity: {value: 512",
            r"kv_capacity \(512 tokens\) must exceed context_length",
        ),
        (
            "kv_capacity: {value: 4096",
            "kv_capacity: {value: 4096.5",
            r"kv_capacity: value 4096.5; must be a whole number",
        ),
        ("prefix_block: {value: 32", "prefix_block: {value: 0", r"prefix_block_tokens must be positive"),
        ("name: tiny-cpu", "nmae: tiny-cpu", r"unknown key 'nmae'"),
        ("parameters:\n", "parameters: [\n", r"t, line \d+: not valid YAML"),
    ],
)
def test_a_bad_profile_is_refused_by_key(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ProfileError, match=message):
        parse_profile(GOOD.replace(old, new), "t")


def test_a_missing_parameter_is_named() -> None:
    text = "\n".join(line for line in GOOD.splitlines() if not line.startswith("  startup:"))
    with pytest.raises(ProfileError, match=r"parameters.startup is missing"):
        parse_profile(text, "t")


def test_an_unknown_name_lists_what_is_shipped() -> None:
    with pytest.raises(ProfileError, match=r"no engine profile 'h100'; shipped: qwen3-0.6b-rtx4090, tiny-cpu"):
        load_profile("h100")
    with pytest.raises(ProfileError, match=r"nowhere.yaml: cannot read"):
        load_profile("./nowhere.yaml")


def test_every_profile_parameter_is_read_somewhere() -> None:
    """A key that nothing reads is a defect."""
    code = "".join(path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "sim").glob("engine*.py"))
    for attribute in load_profile("tiny-cpu").__slots__:
        if attribute not in ("name", "text_sha256"):
            assert f"profile.{attribute}" in code or f"self.{attribute}" in code, attribute


def test_slow_scales_coefficients_so_that_sums_stay_exact() -> None:
    costs = StepCosts(load_profile("tiny-cpu"), 1_500_000)
    assert (costs.decode_base, costs.decode_per_context_token) == (3_000_000_000, 150_000)


def test_profiles_that_are_no_text_or_too_deep(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"name: \xff\n")
    with pytest.raises(ProfileError, match=r"bad.yaml.: cannot read the engine profile as UTF-8 text"):
        load_profile(str(bad))
    bad.write_text("[" * 5000)
    with pytest.raises(ProfileError, match=r"bad.yaml: nested too deeply"):
        load_profile(str(bad))
    with pytest.raises(ProfileError, match="cannot read"):
        load_profile("a\0b.yaml")
