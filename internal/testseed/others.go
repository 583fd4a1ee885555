package testseed

import (
	"runtime"
	"sync/atomic"
)

// TurnsBeside calls work, and returns how often another goroutine had the processor meanwhile. There is one processor until work has returned: so it is
// as often as work let others run.
func TurnsBeside(work func()) int64 {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var turns atomic.Int64
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-stop:
				return
			default:
				turns.Add(1)
				runtime.Gosched()
			}
		}
	}()
	defer func() { // also if work ends its goroutine
		close(stop)
		<-ended
	}()
	work()
	return turns.Load()
}
