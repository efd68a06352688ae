// What the library was built of: `library.py` compares it with the sources beside it, since a call
// written for other sources would read and write foreign memory.
extern "C" const char* onward_sources() { return ONWARD_SOURCES; }
