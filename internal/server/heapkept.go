package server

import (
	"runtime/metrics"
	"slices"
)

// heapKept is what the runtime has taken at least in the last seconds: requests and answers come and go, but what their clients let wait, and
// what open connections, streams, transactions and scans have, stays.
type heapKept struct {
	taken [heapKeptLooks]int64 // a ring; zero before so many looks
	looks int
}

// heapKeptLooks is how many looks, heapInterval apart, something is there before the limit of the heap follows it.
const heapKeptLooks = 16

// note records what is taken now.
func (k *heapKept) note(bytes int64) {
	k.taken[k.looks%heapKeptLooks] = bytes
	k.looks++
}

// least is the least that was noted of late.
func (k *heapKept) least() int64 { return slices.Min(k.taken[:]) }

// heapTaken is what was live in the heap at the end of the last collection, and what the runtime takes beside it: stacks, and parts of pages. All of it
// counts for the limit. Tests replace it.
var heapTaken = func() int64 {
	s := []metrics.Sample{
		{Name: "/gc/heap/live:bytes"},
		{Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/released:bytes"},
		{Name: "/memory/classes/heap/free:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"},
	}
	metrics.Read(s)
	bytes := func(i int) int64 { return int64(s[i].Value.Uint64()) }
	return bytes(0) + bytes(1) - bytes(2) - bytes(3) - bytes(4)
}
