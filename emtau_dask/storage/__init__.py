"""Files, URLs and objects that must not be lost; nothing of rows or of EM."""
