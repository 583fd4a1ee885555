package server

import (
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// admission bounds the requests that are executed at once, their bytes, and the bytes of their
// answers. A request above a bound is refused at once with advice to retry: a queue would only turn
// overload into latency and memory.
//
// Small and large reads, small and large writes, scans, watches and answers have shares of their own, so
// that none of them starves another. Watches wait for room in theirs: no request asks for their responses,
// so that none could be refused. A connection gets bytes of a share only if afterwards at least as many are free as the connection
// has; and of the last quarter only a quarter of what is free afterwards. That is half of the share for the only connection, and less if
// other connections have bytes. So some connections with unread answers, or with large requests, cannot take a whole share, and a connection
// without bytes in the share finds room. What is large for a share, and finds no room in it, needs the large slot beside the share, and is
// refused while that is taken: so it may have any size, and other limits bound its size.
type admission struct {
	deduplicated atomic.Uint64 // requests whose answer is that of an earlier attempt

	words    [shareCount]admissionWord
	refused  atomic.Uint64
	sessions heldSessions
	decoding decoding
	early    earlyAdmissions
	waiting  waitingAnswers
	watches  watchLine
	unknown  [shareCount]claim // of what comes over no connection

	slotTime time.Duration // constant: for which a client may keep a large slot from one other; see slotParts
}

// share is one part of --max-inflight-bytes. Each request and each answer is counted in one share.
type share uint8

const (
	shareSmallReads  share = iota // until they are answered
	shareSmallWrites              // until they are durable
	shareLargeReads
	shareLargeWrites
	shareScans    // from begin to end of the stream: two pages, one being filled and one being sent
	shareMessages // messages that are kept while their requests wait, for as long as their clients like; see holdMessage
	shareWatches  // large responses of watches, until the transport has sent them, but for one beside them; see watchLine
	shareAnswers  // from execution until the transport has sent them
	shareCount
)

// sixteenths of --max-inflight-bytes for each share. That of messages is beside it.
var sixteenths = [shareCount]uint64{1, 1, 2, 4, 4, 1, 1, 3}

const (
	// smallRequestMax is the largest request in the small shares.
	smallRequestMax = 16 << 10
	// countedBytesMin is the smallest size that is counted in a connection's part of a share. The
	// number of streams bounds the sum of smaller sizes, so that they need no shared write.
	countedBytesMin = 4 << 10
	// leftPart is the part of a share that is its last, and the part of what is free that a connection may have of it.
	leftPart = 4
	// largePart is the part of a share above which something is large: alone in the last quarter it may not have room.
	largePart = leftPart * (leftPart + 1)
	// mustPart is the part of the share of answers by which answers to writes may exceed it, and mustOwn what a connection may have of
	// it; see answersFull.
	mustPart = 8
	mustOwn  = 64 << 10
)

// shareOf is the share of a request.
func shareOf(write bool, size int) share {
	sh := shareSmallReads
	if size > smallRequestMax {
		sh = shareLargeReads
	}
	if write {
		sh++
	}
	return sh
}

// writes reports whether requests of the share write.
func (sh share) writes() bool { return sh == shareSmallWrites || sh == shareLargeWrites }

// admissionWord is one share. Both its counts are in one word, so that admitting is one atomic add:
//
//	63            40 39             0
//	+---------------+----------------+
//	| requests (24) |   bytes (40)   |
//	+---------------+----------------+
//
// Invariant: neither half overflows, because each limit is below half of its range and a refused
// add is undone. The bytes of what is in the large slot are not in the word.
type admissionWord struct {
	_     [128]byte // the word alone on its lines: every request writes it
	word  atomic.Uint64
	_     [120]byte
	limit admissionLimit
	large largeSlot // of a connection
}

type admissionLimit struct{ requests, bytes uint64 }

const (
	admissionShift = 40
	admissionOne   = 1 << admissionShift
	admissionBytes = admissionOne - 1
)

// init sets the limits.
func (a *admission) init(requests int, bytes uint64) {
	for sh := range a.words {
		a.words[sh].limit = admissionLimit{requests: uint64(requests), bytes: min(bytes*sixteenths[sh]/16, admissionBytes/2)}
	}
	a.words[shareScans].limit.requests = uint64(scansMax(requests))
	a.sessions.init(requests)
	a.waiting.init(int64(min(bytes, admissionBytes/2)))
	for _, sh := range []share{shareMessages, shareWatches, shareAnswers} {
		a.words[sh].limit.requests = admissionBytes >> 17 // no effective bound: the bytes bound them
	}
	a.watches.admission = a
}

// scanBytesMin is what a scan counts at least, so that the bytes which a connection leaves free leave room for as many scans: each has a session for
// as long as its client likes.
func (a *admission) scanBytesMin() int {
	l := &a.words[shareScans].limit
	return max(int(l.bytes/l.requests), countedBytesMin)
}

func (l *admissionLimit) allows(word uint64) bool {
	return word>>admissionShift <= l.requests && word&admissionBytes <= l.bytes
}

// leaves reports whether a connection that has so many of the bytes of the share leaves enough of them to others.
func (l *admissionLimit) leaves(has int64, word uint64) bool {
	free := l.free(word)
	return has <= free && (has <= free/leftPart || free >= int64(l.bytes/leftPart))
}

// free is the number of bytes of the share that are not in use.
func (l *admissionLimit) free(word uint64) int64 {
	return max(int64(l.bytes)-int64(word&admissionBytes), 0)
}

// isLarge reports whether something is large for the share.
func (l *admissionLimit) isLarge(bytes int64) bool { return bytes > int64(l.bytes/largePart) }

// add adds delta to the word, for a connection that has so many bytes of the share then, if they fit. Bytes that do not fit are never
// counted, not even for a moment: they would take room from what fits.
func (w *admissionWord) add(delta uint64, has int64) bool {
	for {
		before := w.word.Load()
		after := before + delta
		if !w.limit.allows(after) || !w.limit.leaves(has, after) {
			return false
		}
		if w.word.CompareAndSwap(before, after) {
			return true
		}
	}
}

// enter admits a request of a number of bytes, or refuses it. For an admitted request the caller
// calls leave with the same arguments.
func (a *admission) enter(conn *connection, sh share, bytes int) bool {
	if !a.enterBeside(conn, sh, 0, bytes) {
		return false
	}
	if !sh.writes() || a.countOne(conn, sh) {
		return true
	}
	a.leaveShare(conn, sh, bytes)
	a.refused.Add(1)
	return false
}

// enterBeside is enter for what a request makes that has own bytes in the share, or in the large slot, already: in the slot both are one. Its client's
// requests are counted without it. For what is admitted the caller calls leaveBeside.
func (a *admission) enterBeside(conn *connection, sh share, own, bytes int) bool {
	if a.admits(conn, a.claim(conn, sh), sh, own, bytes) {
		return true
	}
	a.refused.Add(1)
	return false
}

// countOne counts a request of a client that may wait for a slow device, if the client leaves enough of its share to others. The rule for bytes is none for
// large ones, too: they may take little while they wait, and the share may have room for many.
func (a *admission) countOne(conn *connection, sh share) bool {
	w := &a.words[sh]
	all := int64(w.limit.requests)
	return conn.ownsRequests(sh).takeOne(all-int64(w.word.Load()>>admissionShift), all)
}

// beginWait counts a request that was executed and waits for a sync, or refuses it: reads are not counted for their clients before, and a slow device
// would let one client have all of them. Writes are counted. After nil the caller calls endWait.
func (a *admission) beginWait(conn *connection, sh share) error {
	if !sh.writes() && !a.countOne(conn, sh) {
		a.refused.Add(1)
		return errOverloaded
	}
	return nil
}

func (a *admission) endWait(conn *connection, sh share) {
	if !sh.writes() {
		conn.ownsRequests(sh).add(-1)
	}
}

func (a *admission) leaveBeside(conn *connection, sh share, own, bytes int) {
	if own == 0 {
		a.leaveShare(conn, sh, bytes)
	} else {
		a.shrink(conn, sh, own+bytes, own)
	}
}

// count counts a response of a watch for which the line has found room.
func (a *admission) count(conn *connection, sh share, bytes int) {
	a.words[sh].word.Add(admissionOne + uint64(bytes))
	if bytes >= countedBytesMin {
		conn.ownsBytes(sh).add(int64(bytes))
	}
}

// claim is that of a connection's requests to the large slot of a share.
func (a *admission) claim(conn *connection, sh share) *claim {
	if conn == nil {
		return &a.unknown[sh]
	}
	return &conn.claims[sh]
}

func (a *admission) admits(conn *connection, c *claim, sh share, own, bytes int) bool {
	w, one := &a.words[sh], uint64(0)
	if own == 0 {
		one = admissionOne
	}
	if own > 0 && w.large.change(conn, int64(own), int64(own+bytes)) {
		return true
	}
	if a.add(conn, sh, one+uint64(bytes), bytes) {
		return true
	}
	if !a.takeLarge(conn, c, sh, int64(own+bytes)) {
		return false
	}
	if own > 0 {
		a.remove(conn, sh, own, 0)
	} else if w.word.Add(one)>>admissionShift > w.limit.requests {
		a.leaveShare(conn, sh, bytes)
		return false
	}
	return true
}

// takeLarge takes the large slot of a share of requests for what finds no room in the share. What is in the slot, and fits into the share by now,
// goes back there: most of a request may have been left since.
func (a *admission) takeLarge(conn *connection, c *claim, sh share, bytes int64) bool {
	w := &a.words[sh]
	if !w.limit.isLarge(bytes) {
		return false
	}
	for !w.large.take(conn, c, bytes) {
		if h := w.large.held.Load(); h == nil || !a.returnHeld(sh, h) {
			return false
		}
	}
	return true
}

// forget ends the claims of a connection that has ended.
func (a *admission) forget(conn *connection) {
	for sh := range a.words {
		a.words[sh].large.forget(&conn.claims[sh])
	}
}

// returnHeld counts in its share what is in the large slot, if it fits there.
func (a *admission) returnHeld(sh share, h *largeHeld) bool {
	conn, ok := h.owner.(*connection)
	if !ok || !a.add(conn, sh, uint64(h.bytes), int(h.bytes)) {
		return false
	}
	if !a.words[sh].large.leave(conn, h.bytes) { // it has ended meanwhile
		a.remove(conn, sh, int(h.bytes), 0)
	}
	return true
}

// add counts bytes in a share, and in the connection's part of it, if they fit.
func (a *admission) add(conn *connection, sh share, delta uint64, bytes int) bool {
	w := &a.words[sh]
	if bytes < countedBytesMin {
		if w.limit.allows(w.word.Add(delta)) {
			return true
		}
		w.word.Add(-delta)
		return false
	}
	after := w.word.Load() + delta
	if !w.limit.leaves(int64(bytes), after) { // not even alone
		return false
	}
	own := conn.ownsBytes(sh)
	has, ofClient := own.add(int64(bytes))
	if !own.leaves(int64(bytes), has, ofClient, w.limit.free(after), int64(w.limit.bytes)) || !w.add(delta, has) {
		own.add(-int64(bytes))
		return false
	}
	return true
}

// remove leaves a share, and the connection's part of it, with fewer bytes of what is counted there.
func (a *admission) remove(conn *connection, sh share, from, to int) {
	if from >= countedBytesMin {
		left := 0
		if to >= countedBytesMin {
			left = to
		}
		conn.ownsBytes(sh).add(int64(left - from))
	}
	a.words[sh].word.Add(-uint64(from - to))
}

// enterKind is enter for a request of a kind. A request whose answer cannot be refused once it exists
// is refused while no answer would be admitted.
func (a *admission) enterKind(conn *connection, k kind, sh share, bytes int) bool {
	if !a.enter(conn, sh, bytes) {
		return false
	}
	if k == kindWriteAndRead && a.answersFull(conn) {
		a.leave(conn, sh, bytes)
		return false
	}
	return true
}

func (a *admission) leave(conn *connection, sh share, bytes int) {
	a.leaveShare(conn, sh, bytes)
	if sh.writes() {
		conn.ownsRequests(sh).add(-1)
	}
}

// leaveShare is leave of what countOne has not counted.
func (a *admission) leaveShare(conn *connection, sh share, bytes int) {
	w, delta := &a.words[sh], uint64(admissionOne)
	if !w.large.leave(conn, int64(bytes)) {
		delta += uint64(bytes)
		if bytes >= countedBytesMin {
			conn.ownsBytes(sh).add(-int64(bytes))
		}
	}
	w.word.Add(-delta)
}

// shrink leaves an admitted request with fewer bytes, in the large slot or in the share.
func (a *admission) shrink(conn *connection, sh share, from, to int) {
	if from != to && !a.words[sh].large.change(conn, int64(from), int64(to)) {
		a.remove(conn, sh, from, to)
	}
}

// must admits a request without bytes whatever the limits are. A scan that could not get more bytes
// uses it, and then ends.
func (a *admission) must(sh share) { a.words[sh].word.Add(admissionOne) }

// inflight is the current number of requests, of their bytes, and of the bytes of their answers and of what waits.
func (a *admission) inflight() (requests int, bytes, answers int64) {
	for sh := range a.words {
		word := a.words[sh].word.Load()
		of := int64(word&admissionBytes) + a.words[sh].large.bytes()
		if sh := share(sh); sh == shareMessages || sh == shareWatches || sh == shareAnswers {
			answers += of
			continue
		}
		requests += int(word >> admissionShift)
		bytes += of
	}
	return requests, bytes, answers + a.watches.beside.bytes()
}

// holdSession counts a session that a read of the connection holds while it waits, or refuses it.
// After nil the caller must release the session from a.sessions.
func (a *admission) holdSession(conn *connection) error {
	if !a.sessions.hold(conn) {
		a.refused.Add(1)
		return mvcc.ErrTooManySessions
	}
	return nil
}

// holdWrite is holdSession for a write, while it commits. The own counts of one that need not read first are those of its client alone. After nil the
// caller must release the session from a.sessions.writes.
func (a *admission) holdWrite(own owned) error {
	if !a.sessions.writes.hold(own, 1) {
		a.refused.Add(1)
		return mvcc.ErrTooManySessions
	}
	return nil
}

// holdWalk counts the sessions of one more walk of a watch, or refuses it. After nil the caller must release
// them from a.sessions.walks.
func (a *admission) holdWalk(conn *connection, sessions int) error {
	if !a.sessions.walks.hold(conn.owns(ownedWalks), int64(sessions)) {
		a.refused.Add(1)
		return mvcc.ErrTooManySessions
	}
	return nil
}
