"""What guidellm uses of torch to read prompts: a data loader of one process. It spares gigabytes of CUDA libraries.

Nothing else of torch is used for text. As there is no version number, transformers takes it for absent; datasets asks whether
values are of its types.
"""

import sys
import types
import typing

T = typing.TypeVar("T")


class Generator:
    """Random numbers for shuffling, which is off."""

    def manual_seed(self, seed: int) -> "Generator":
        return self


class Tensor:
    """Nothing is one."""


class Module:
    """Nothing is one."""


class IterableDataset(typing.Generic[T]):
    """A dataset that is iterated over."""


class DataLoader(typing.Generic[T]):
    """Batches of one row, in their order, in this process."""

    def __init__(self, dataset, batch_size, shuffle, collate_fn, num_workers, prefetch_factor, generator):
        if batch_size != 1 or shuffle:
            raise NotImplementedError("batches of one row, without shuffling")
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __iter__(self):
        return (self.collate_fn([row]) for row in self.dataset)


def get_worker_info() -> None:
    """There are no loader processes."""


def _module(name: str, **members) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
    return module


_loader = _module("torch.utils.data.dataloader", DataLoader=DataLoader)
_dataset = _module("torch.utils.data.dataset", IterableDataset=IterableDataset)
_data = _module("torch.utils.data", dataloader=_loader, dataset=_dataset, get_worker_info=get_worker_info)
nn = _module("torch.nn", Module=Module)
utils = _module("torch.utils", data=_data)
