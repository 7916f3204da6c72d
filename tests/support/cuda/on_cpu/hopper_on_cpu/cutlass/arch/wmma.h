// Stands for CUTLASS's header of this name on the CPU: its products are not used here.
#pragma once
