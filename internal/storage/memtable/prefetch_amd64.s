#include "textflag.h"

// func prefetch(lines *[windowOps]unsafe.Pointer, n, count int)
TEXT ·prefetch(SB), NOSPLIT, $0-24
	MOVQ lines+0(FP), SI
	MOVQ n+8(FP), CX
	MOVQ count+16(FP), DX
	TESTQ CX, CX
	JZ   done
next:
	MOVQ (SI), AX
	MOVQ DX, BX
line:
	PREFETCHT0 (AX)
	ADDQ $64, AX
	SUBQ $1, BX
	JNZ  line
	ADDQ $8, SI
	SUBQ $1, CX
	JNZ  next
done:
	RET
