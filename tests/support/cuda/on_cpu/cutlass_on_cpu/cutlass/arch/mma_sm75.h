// See mma_sm80.h beside it.
#pragma once

#include "cutlass/arch/mma_sm80.h"
