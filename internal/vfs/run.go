package vfs

import (
	"golang.org/x/sys/unix"
)

// vectorMax is how many buffers one preadv or pwritev takes (IOV_MAX).
const vectorMax = 1024

// requestRun is a range of requests, in the batch's order, whose ranges in the file are neighbours, so that one preadv
// or pwritev does them.
type requestRun struct{ from, to int }

// nextRun is the run that begins at request from.
func nextRun(reqs []Request, from int) requestRun {
	to := from + 1
	end := reqs[from].Offset + int64(len(reqs[from].Buf))
	for to < len(reqs) && to-from < vectorMax && reqs[to].Offset == end {
		end += int64(len(reqs[to].Buf))
		to++
	}
	return requestRun{from, to}
}

// countRuns is the number of runs of a batch.
func countRuns(reqs []Request) int {
	runs := 0
	for from := 0; from < len(reqs); runs++ {
		from = nextRun(reqs, from).to
	}
	return runs
}

// doRuns does a batch on the caller's thread, with one system call for each run.
func doRuns(f *osFile, op Op, reqs []Request) {
	buffers := make([][]byte, 0, min(len(reqs), vectorMax))
	for from := 0; from < len(reqs); {
		run := nextRun(reqs, from)
		from = run.to
		if run.to-run.from == 1 {
			runOne(f, op, &reqs[run.from], 0)
			continue
		}
		buffers = buffers[:0]
		for i := run.from; i < run.to; i++ {
			buffers = append(buffers, reqs[i].Buf)
		}
		completeRun(f, op, reqs[run.from:run.to], vectorOnce(f.fd, op, buffers, reqs[run.from].Offset))
	}
}

// vectorOnce is how many bytes one preadv(2) or pwritev(2) transferred. It ignores the error: completeRun gets it again
// for the request that it concerns.
func vectorOnce(fd int, op Op, buffers [][]byte, off int64) int {
	call := unix.Preadv
	if op == OpWrite {
		call = unix.Pwritev
	}
	for {
		n, err := call(fd, buffers, off)
		if err != unix.EINTR {
			return max(n, 0)
		}
	}
}

// completeRun sets the errors of a run of which the first done bytes were transferred. It does the request at which the
// call stopped, and each later one, with a call of its own, which gives each request its own error.
func completeRun(f *osFile, op Op, reqs []Request, done int) {
	for i := range reqs {
		req := &reqs[i]
		if done >= len(req.Buf) {
			done -= len(req.Buf)
			req.Err = nil
			continue
		}
		runOne(f, op, req, done)
		done = 0
	}
}
