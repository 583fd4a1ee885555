package harness

import (
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// OpenLoop lets calls arrive at a fixed rate for a while, whether or not those before are done. Latencies are from the moment at
// which a call was due: a stall counts for every call that it delays, and not once, as in a closed loop. At most callers calls are
// under way at once; the others wait, and their wait counts. Lateness is that of the arrivals themselves, which is the load generator's
// own part in the latencies.
func OpenLoop(rate float64, window time.Duration, callers int, op func(caller int) error) (latencies []*Recorder, lateness *Recorder, err error) {
	count := max(int(rate*window.Seconds()), 1)
	arrivals := make(chan time.Time, count)
	errs := make([]error, callers)
	latencies = make([]*Recorder, callers)
	var wait sync.WaitGroup
	for c := range callers {
		latencies[c] = NewRecorder()
		wait.Go(func() {
			for due := range arrivals {
				if errs[c] != nil {
					continue // the queue is emptied, so that everybody comes to an end
				}
				errs[c] = op(c)
				latencies[c].Record(time.Since(due))
			}
		})
	}
	lateness = arrive(arrivals, rate, count)
	close(arrivals)
	wait.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, nil, err
		}
	}
	return latencies, lateness, nil
}

// arrive sends the times at which calls are due, each when it has come. It sleeps in the kernel: the runtime's timers are up to a
// millisecond late in a process that is otherwise idle, which is longer than most calls take.
func arrive(arrivals chan<- time.Time, rate float64, count int) *Recorder {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	late := NewRecorder()
	interval, began := float64(time.Second)/rate, time.Now()
	for i := range count {
		due := began.Add(time.Duration(float64(i) * interval))
		for left := time.Until(due); left > 0; left = time.Until(due) {
			pause := unix.NsecToTimespec(left.Nanoseconds())
			_ = unix.Nanosleep(&pause, nil) // a signal ends it early, and the loop goes on
		}
		late.Record(time.Since(due))
		arrivals <- due // never blocks: there is room for all of them
	}
	return late
}
