package server

import (
	"runtime/metrics"
	"slices"
)

// heapKept is what the runtime has taken in a quarter of the last seconds: most requests and answers come and go, but what their clients let wait, and
// what open connections, streams, transactions and scans have, stays. It need not have stayed all the time: clients that gave up a thousand scans every
// three seconds, and began them again at once, made a get take seven times the processor time.
type heapKept struct {
	taken [heapKeptLooks]int64 // a ring; zero before so many looks
	looks int
}

const (
	// heapKeptLooks is how many looks, heapInterval apart, are compared.
	heapKeptLooks = 16
	// heapKeptMost is in how many of them something is there before the limit of the heap follows it.
	heapKeptMost = heapKeptLooks / 4
)

// note records what is taken now.
func (k *heapKept) note(bytes int64) {
	k.taken[k.looks%heapKeptLooks] = bytes
	k.looks++
}

// often is what was there at least in heapKeptMost of the looks of late.
func (k *heapKept) often() int64 {
	taken := k.taken
	slices.Sort(taken[:])
	return taken[heapKeptLooks-heapKeptMost]
}

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
