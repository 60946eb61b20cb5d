"""One file a version of the schema; a version that was released is never edited."""
