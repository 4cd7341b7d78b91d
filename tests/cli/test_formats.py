"""``lowbit formats``: published examples, JSON, every format."""

import json
import re

import pytest
import torch

import lowbit as lb
from lowbit.formats import FORMATS


def lines_of(text: str) -> dict[str, str]:
    """Value by bits."""
    return dict(re.findall(r"^0x[0-9a-f]+  (\S+)\s+(\S+)", text, re.MULTILINE))


def test_formats_lists_every_format(run):
    table = run("formats")
    assert [line.split()[0] for line in table.splitlines()[1:] if line][: len(FORMATS)] == list(FORMATS)
    assert max(map(len, table.splitlines())) <= 80
    assert {row["name"] for row in json.loads(run("formats", "--json"))} == set(FORMATS)


def test_published_examples_come_out(run):
    e4m3 = lines_of(run("formats", "fp8_e4m3"))
    assert len(e4m3) == 256
    expected = {
        "0|0110|100": "0.75",
        "1|1010|011": "-11",
        "0|0000|010": "2^-8",
        "0|1111|110": "448",
        "0|1111|111": "NaN",
    }
    assert {bits: e4m3[bits] for bits in expected} == expected
    e5m2 = lines_of(run("formats", "fp8_e5m2"))
    assert (e5m2["0|11111|00"], e5m2["1|11111|00"]) == ("Inf", "-Inf")
    biased = lines_of(run("formats", "e2m1b3"))
    assert (biased["0|00|1"], biased["0|11|1"], biased["1|11|0"]) == ("0.125", "1.5", "-1")
    assert lines_of(run("formats", "int8", "--scale", "2^-4"))["10000001"] == "-7.9375"
    assert lines_of(run("formats", "int4", "--scale", "0.25"))["0111"] == "1.75"


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if row.bits <= 8])
def test_json_codes_decode_to_their_values(run, name):
    listed = json.loads(run("formats", name, "--json"))["codes"]
    codes = torch.tensor([line["code"] for line in listed], dtype=torch.uint8)
    values = torch.tensor([float(line["value"]) for line in listed])
    assert torch.equal(lb.decode(codes, name).nan_to_num(nan=7e4), values.nan_to_num(nan=7e4))
    assert [int(line["bits"].replace("|", ""), 2) for line in listed] == codes.tolist()


def test_formats_describes_schemes_and_wide_formats(run):
    assert "4.25" in run("formats", "mxfp4") and "1 x 128" in run("formats", "int4:group128")
    assert "too many to list" in run("formats", "bf16")
