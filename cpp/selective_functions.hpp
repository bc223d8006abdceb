// The functions of the selective scan, as the module has them.
#pragma once

#include "arguments.hpp"

namespace megablocks {

void define_selective(nanobind::module_& m);

}  // namespace megablocks
