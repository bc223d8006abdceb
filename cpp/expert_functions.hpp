// The functions of experts, as the module has them.
#pragma once

#include "arguments.hpp"

namespace megablocks {

void define_experts(nanobind::module_& m);

}  // namespace megablocks
