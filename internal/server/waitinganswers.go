package server

import "sync/atomic"

// waitingAnswers bounds what the answers of all pipelines of the direct transport take while they wait for durability, or for the
// device: while a sync takes long, each pipeline may have thousands of them. A pipeline counts what it has beyond waitingOwn, in steps,
// so that pipelines rarely write to the count that all of them share. While more than the limit is counted, pipelines that have
// waitingOwn execute no more requests.
type waitingAnswers struct {
	limit int64 // constant after Open
	held  atomic.Int64
}

const (
	// waitingAnswerBytes is about what an answer takes beside a value: its place in two lists, and a buffer.
	waitingAnswerBytes = 1 << 10
	// waitingOwn is what each pipeline may always have.
	waitingOwn  = 16 << 10
	waitingStep = 64 << 10
	// waitingPart is the part of --max-inflight-bytes that the answers have.
	waitingPart = 4
)

func (w *waitingAnswers) init(inflight int64) { w.limit = inflight / waitingPart }

// count changes what a pipeline has counted to what so many bytes need, in steps.
func (w *waitingAnswers) count(counted *int64, bytes int64) {
	n := max(0, bytes-waitingOwn)
	change := int64(0)
	if n > *counted {
		change = (n - *counted + waitingStep - 1) / waitingStep * waitingStep
	} else if bytes == 0 || *counted-n >= 2*waitingStep {
		change = -(*counted - n) / waitingStep * waitingStep
	}
	if change != 0 {
		*counted += change
		w.held.Add(change)
	}
}

// full reports whether pipelines may have no more than waitingOwn.
func (w *waitingAnswers) full() bool { return w.held.Load() > w.limit }
