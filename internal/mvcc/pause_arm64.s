#include "textflag.h"

// func pause(n uint32)
TEXT ·pause(SB), NOSPLIT, $0-4
	MOVW n+0(FP), R0
again:
	YIELD
	SUBW $1, R0
	CBNZ R0, again
	RET
