// CPU replacement of CUTLASS's header of this name, whose products are not used.
#pragma once
