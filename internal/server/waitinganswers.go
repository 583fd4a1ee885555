package server

import (
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// waitingAnswers bounds what the small answers of all pipelines take that nothing else counts: those that wait for durability, or for the device, because
// while a sync takes long each pipeline may have thousands of them, and those that the direct transport has and the windows of their clients do not allow to be
// sent, because those that have waited are sent whatever the windows are. The gRPC library takes no more of a pipeline than its windows allow; the
// others stay in its queue.
//
// A pipeline, and what the transport has for a connection, count beyond waitingOwn, in steps, so that they rarely write to counters that
// are shared. A pipeline that has waitingOwn executes no more requests while its client does not leave enough to others, as with the shares: see owned.leaves.
//
// Invariant: held is the sum of what each client has, but at most what it may have with no others: what a client has beyond that, waitingOwn of each of many
// pipelines, takes nothing from the part of others.
type waitingAnswers struct {
	limit int64 // constant after Open
	held  atomic.Int64
}

const (
	// waitingAnswerBytes is about what an answer takes beside a value: its place in two lists, and a buffer.
	waitingAnswerBytes = 1 << 10
	// waitingOwn is what each pipeline, and the transport for each connection, may always have.
	waitingOwn  = 8 << 10
	waitingStep = 64 << 10
	// waitingPart is the part of --max-inflight-bytes that the answers have.
	waitingPart = 4
)

func (w *waitingAnswers) init(inflight int64) { w.limit = inflight / waitingPart }

// clientMost is what a client has of the limit at most.
func (w *waitingAnswers) clientMost() int64 {
	return w.limit / (mvcc.ClientTakes + 1) * mvcc.ClientTakes
}

// count changes what is counted, of what a client owns, to what so many bytes need.
func (w *waitingAnswers) count(own owned, counted *int64, bytes int64) {
	n := max(0, bytes-waitingOwn)
	change := int64(0)
	if n > *counted {
		change = (n - *counted + waitingStep - 1) / waitingStep * waitingStep
	} else if bytes == 0 || *counted-n >= 2*waitingStep {
		change = -(*counted - n) / waitingStep * waitingStep
	}
	if change == 0 {
		return
	}
	*counted += change
	_, ofClient := own.add(change)
	if own.client == nil {
		w.held.Add(change)
		return
	}
	w.held.Add(min(ofClient, w.clientMost()) - min(ofClient-change, w.clientMost()))
}

// pipelineAnswers are those of one pipeline that wait. The mutex of its user guards what changes.
type pipelineAnswers struct {
	total *waitingAnswers
	own   owned // what the client has of the total

	waiting int   // answers
	bytes   int   // of them
	counted int64 // what they take, as total knows
}

func (p *pipelineAnswers) init(total *waitingAnswers, own owned) { p.total, p.own = total, own }

// add counts more answers, of so many bytes, or fewer.
func (p *pipelineAnswers) add(answers, bytes int) {
	p.waiting += answers
	p.bytes += bytes
	p.total.count(p.own, &p.counted, p.cost())
}

// drop counts none of them any more.
func (p *pipelineAnswers) drop() { p.total.count(p.own, &p.counted, 0) }

func (p *pipelineAnswers) cost() int64 { return int64(p.waiting)*waitingAnswerBytes + int64(p.bytes) }

// hasEnough reports whether the pipeline has at least so much while its client leaves too little to the pipelines of others.
func (p *pipelineAnswers) hasEnough(least int64) bool {
	return p.cost() >= least && p.total.full(p.own)
}

// full reports whether pipelines of a client may have no more than waitingOwn.
func (w *waitingAnswers) full(own owned) bool {
	has, ofClient := own.add(0)
	free := w.limit - w.held.Load()
	if own.client == nil {
		return free < 0
	}
	return !own.leaves(0, has, ofClient, free, w.limit)
}
