"""Pictures of masks, scores, tiles and plans. They need matplotlib: pip install 'attnloom[plots]'.

Each function returns a matplotlib Figure of its own: show it in a notebook, or `savefig` it. Tiles
are drawn from the lists of a BlockMask, of any length; tokens and scores are evaluated in the
region that is drawn. `explain_html` makes a page without matplotlib.
"""

from attnloom.plots.block_map import plot_block_map
from attnloom.plots.mask import plot_mask
from attnloom.plots.page import explain_html
from attnloom.plots.plan import plot_plan
from attnloom.plots.scores import plot_scores

__all__ = ["explain_html", "plot_block_map", "plot_mask", "plot_plan", "plot_scores"]
