"""Text that reads the image before it."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.extent import Axis, limited
from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_flags, read_size
from attnloom.mods.extent import of_table


def flamingo(
    media_locations: Tensor, tokens_per_image: int, *, only_immediate: bool = True
) -> MaskMod:
    """Cross attention of text to images: each text token sees the last image before it.

        images up to and with q_idx == kv_idx // tokens_per_image + 1

    Args:
        media_locations: [B, Q_LEN] or [Q_LEN] bool, true at the text token that stands for an
            image; that token itself sees its image.
        tokens_per_image: 1 or more; the keys are the images' tokens, one image after the other.
        only_immediate: False shows all images up to there, not the last alone.
    Returns:
        mask_mod capturing the number of images seen so far by each text token. Text before the
        first image sees nothing and gets 0.
    Raises:
        ModError: media_locations is no such tensor, or tokens_per_image < 1.
    Source: Alayrac et al. 2022, arXiv:2204.14198, sec. 2.3.
    """
    flags = read_flags("flamingo", "media_locations", media_locations)
    size = read_size("flamingo", "tokens_per_image", tokens_per_image, 1)
    seen = flags.cumsum(-1).int()
    batched = seen.dim() == 2

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        image = (seen[b, q_idx] if batched else seen[q_idx]) - 1
        owner = kv_idx // size
        return owner == image if only_immediate else owner <= image

    leading: tuple[Axis, ...] = ("batch",) if batched else ()
    return limited(mask_mod, *of_table("flamingo", "media_locations", seen, *leading, "Q_LEN"))
