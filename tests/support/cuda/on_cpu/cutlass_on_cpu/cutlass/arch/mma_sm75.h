// See mma_sm80.h.
#pragma once

#include "cutlass/arch/mma_sm80.h"
