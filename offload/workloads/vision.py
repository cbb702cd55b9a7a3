"""A residual U-Net that segments large drawn scenes: discs, boxes and triangles on texture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.workloads.base import Batch, TrainableModel, Workload

__all__ = ["CLASSES", "UNet", "VisionConfig", "draw_scene", "vision_workload"]

CLASSES = ("background", "disc", "box", "triangle")
SHAPES_PER_SCENE = 12


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the U-Net and of its batches.

    Args:
        size: height and width of an image; a multiple of ``2 ** (levels - 1)``.
        rows: images in a batch.
        width: channels at full resolution; they double at every level.
        levels: resolutions, each half of the one before.
    """

    size: int = 512
    rows: int = 2
    width: int = 24
    levels: int = 4

    def __post_init__(self) -> None:
        if self.size % 2 ** (self.levels - 1):
            raise ValueError(f"size {self.size} cannot be halved {self.levels - 1} times")


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm beside a 1x1 shortcut; (B, C, H, W) to (B, C', H, W)."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, bias=False)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output; the sum is rectified in place, as ResNets do."""
        h = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x), inplace=True)


class UpBlock(nn.Module):
    """Doubles the resolution and joins the encoder's output of that level."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.join = ResidualBlock(2 * channels, channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """From ``(B, 2C, H/2, W/2)`` and the skip of ``(B, C, H, W)`` to ``(B, C, H, W)``."""
        out: Tensor = self.join(torch.cat((self.up(x), skip), dim=1))
        return out


class UNet(TrainableModel):
    """Encoder, decoder and a 1x1 classifier; returns the mean cross-entropy over pixels."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        widths = [config.width * 2**level for level in range(config.levels)]
        pairs = zip([3, *widths[:-1]], widths, strict=True)
        self.down = nn.ModuleList(ResidualBlock(before, after) for before, after in pairs)
        self.up = nn.ModuleList(UpBlock(width) for width in reversed(widths[:-1]))
        self.classify = nn.Conv2d(config.width, len(CLASSES), 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss.

        Args:
            images: float32 of shape ``(B, 3, H, W)``.
            labels: class of every pixel, int64 of shape ``(B, H, W)``.
        """
        skips: list[Tensor] = []
        x = images
        for level, block in enumerate(self.down):
            x = self.run_block(block, F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = self.run_block(block, x, skips.pop())
        return F.cross_entropy(self.classify(x), labels)


def draw_scene(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One image with shapes over and beside each other, and the class of every pixel.

    Returns:
        image, float32 of shape ``(3, size, size)`` with mean about 0, and labels, int64 of shape
        ``(size, size)``. Colours say nothing about the class: only the outline does.
    """

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    axis = torch.linspace(0.0, 1.0, size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    slope = uniform(3, 1, 1) * x + uniform(3, 1, 1) * y
    image = slope + 0.2 * torch.sin(40.0 * (uniform(3, 1, 1) * x + uniform(3, 1, 1) * y))
    labels = torch.zeros(size, size, dtype=torch.int64)
    for shape in range(SHAPES_PER_SCENE):
        kind = 1 + shape % (len(CLASSES) - 1)
        centre_y, centre_x, scale, turn = uniform(4).tolist()
        mask = _inside(kind, x - centre_x, y - centre_y, 0.05 + 0.12 * scale, 2 * math.pi * turn)
        image = torch.where(mask, uniform(3, 1, 1) * 1.5 + 0.2 * slope, image)
        labels = torch.where(mask, kind, labels)
    noise = torch.randn((3, size, size), generator=generator)
    return image - 0.7 + 0.1 * noise, labels


def _inside(kind: int, x: Tensor, y: Tensor, radius: float, turn: float) -> Tensor:
    u = math.cos(turn) * x + math.sin(turn) * y
    v = math.cos(turn) * y - math.sin(turn) * x
    if CLASSES[kind] == "disc":
        return u * u + v * v < radius * radius
    if CLASSES[kind] == "box":
        return (u.abs() < radius) & (v.abs() < 0.6 * radius)
    return (v > -0.5 * radius) & (v + math.sqrt(3.0) * u.abs() < radius)


def vision_workload(name: str, config: VisionConfig) -> Workload:
    """Segmentation of drawn scenes; no two are alike, so held-out data is just another draw."""

    def make_batch(generator: torch.Generator, held_out: bool) -> Batch:
        scenes = [draw_scene(config.size, generator) for _ in range(config.rows)]
        return torch.stack([s[0] for s in scenes]), torch.stack([s[1] for s in scenes])

    c = config
    summary = (
        f"residual U-Net, {c.levels} levels from {c.width} channels, {c.size}x{c.size}, B {c.rows}"
    )
    return Workload(name, summary, partial(UNet, config), make_batch)
