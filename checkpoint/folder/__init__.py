"""The files of a checkpoint's folder: where it is, its weight files, and everything beside them."""
