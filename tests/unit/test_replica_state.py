"""State that a replica gets from another one, without process groups."""

import pytest
import torch

from fsdp_compile import replicas


@pytest.mark.parametrize("lacking", ["here", "there"])
def test_optimizer_states_of_other_lengths(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    """Where one replica's optimizer has more state than the other's, an error names the first that is too much."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def send(mine: tuple[list[object], list[object]], group: object) -> tuple[list[object], list[object]]:
        outline, values = mine
        return ([*outline, ("more", "of it")] if lacking == "here" else outline[:-1]), values

    monkeypatch.setattr(replicas, "broadcast_object", send)
    says = "nothing here, .*more.* on the replica" if lacking == "here" else r"\(.* here, nothing on the replica"
    with pytest.raises(RuntimeError, match=f"optimizer: its state differs between replicas: {says}"):
        replicas._copy_optimizer(model, optimizer, None)
