"""Keys and values in pages: who owns which page, where tokens lie, and the tensors themselves."""

from attnloom.paged.allocator import PageAllocator
from attnloom.paged.batch import PagedBatch
from attnloom.paged.book import PageBook
from attnloom.paged.cache import PagedKVCache
from attnloom.paged.table import PagedKV, PageTable

__all__ = ["PageAllocator", "PageBook", "PageTable", "PagedBatch", "PagedKV", "PagedKVCache"]
