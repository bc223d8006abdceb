"""What a model leaves to a mixer when it draws its matrices."""

from megablocks_core.layers.ssm import GatedDeltaNet, Mamba1, Mamba2
from megablocks_core.layers.ssm.mixers.initial import draws_itself


def test_projections_are_the_models_and_the_rest_is_the_mixers():
    mixers = [
        Mamba1(8, device="meta"),
        Mamba2(8, num_heads=2, head_dim=4, state_size=4, device="meta"),
        GatedDeltaNet(8, num_key_heads=2, num_value_heads=2, key_dim=4, value_dim=4, device="meta"),
    ]
    left = {name for mixer in mixers for name, part in mixer.named_modules() if draws_itself(part)}
    assert left == {"", "conv1d", "dt_proj"}
