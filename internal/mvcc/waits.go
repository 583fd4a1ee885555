package mvcc

import "time"

// Waits says where the requests of a session have waited. Only waits are measured, each where it happens: a request that
// waits for nothing reads no clock.
type Waits struct {
	Latch  time.Duration // for other commits: latches of its keys, and epochs that must be visible before
	Memory time.Duration // for room in the memtable, a log segment, or by the throttle
	Pages  time.Duration // for pages of the data file
	Reads  uint64        // such pages
}

// TakeWaits adds the waits since the last call to w. The session begins anew.
func (x *Session) TakeWaits(w *Waits) {
	pages, took := x.reader.TakeReads()
	if pages == 0 && x.parker.waited == 0 && x.committing.memory == 0 {
		return
	}
	w.Latch += x.parker.waited
	w.Memory += x.committing.memory
	w.Pages += took
	w.Reads += pages
	x.parker.waited, x.committing.memory = 0, 0
}
