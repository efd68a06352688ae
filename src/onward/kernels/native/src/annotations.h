// What a function that Python calls says of its pointers, for the check of each call.
//
// Such a function is `extern "C" void onward_<name>(...)`, defined in one of the files here.
// `signatures.py` reads the definition, and `library.py` checks a call by it before it is made: the
// arguments' names, kinds, dtypes, and how many numbers lie behind a pointer. A pointer to const is
// read, another one is written. To the compiler the annotations are nothing. Pointers to T, or to U,
// are to elements of a type that the call chooses, whose code the function has as `element_T`.
#pragma once
#include <cstdint>

#define OF(count)  // so many numbers; without it, as many as the strides beside it reach
#define OPTIONAL   // may be null

using code_t = uint8_t;  // to Python a number, where uint8_t is a truth value
