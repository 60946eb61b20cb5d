// A loop over the elements of a row.
#pragma once
#include "../vec/vec.h"

// The last lanes of a row are computed like all others: an element's bits do not depend on its place.
template <class F>
void each(int64_t width, F f) {
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) f(i, first_lanes(kLanes));
    if (i < width) f(i, first_lanes(width - i));
}
