#include "textflag.h"

// func prefetch(lines *[windowOps]unsafe.Pointer, n, count int)
TEXT ·prefetch(SB), NOSPLIT, $0-24
	MOVD lines+0(FP), R0
	MOVD n+8(FP), R1
	MOVD count+16(FP), R2
	CBZ  R1, done
next:
	MOVD (R0), R3
	MOVD R2, R4
line:
	PRFM (R3), PLDL1KEEP
	ADD  $64, R3
	SUB  $1, R4
	CBNZ R4, line
	ADD  $8, R0
	SUB  $1, R1
	CBNZ R1, next
done:
	RET
