package server

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"sync/atomic"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/transport"
)

const (
	// scanPageBytesDefault keeps the stream busy (a page takes a fraction of a millisecond) and the
	// memory of a scan small.
	scanPageBytesDefault = 256 << 10
	// scanPageBytesMax is the largest page that a client may request. A larger page would only
	// delay its first entry.
	scanPageBytesMax = 4 << 20
	// scanEntryBytes is what an entry counts in a page at least, which is more than a tiny one takes: a client takes some 100 bytes for
	// each beside its key and value.
	scanEntryBytes = 32
	// scanEntryOverhead and scanPageOverhead are what an entry and a page have beside keys and values when they are encoded, at most,
	// without expiry and lease.
	scanEntryOverhead = 24
	scanPageOverhead  = 128
	// scanCountPage is the number of entries that a count-only scan covers between two pages. The
	// pages keep the stream alive.
	scanCountPage = 1 << 18
	// scanCheckEvery is the number of entries between two checks of the context: about a tenth of a
	// millisecond.
	scanCheckEvery = 1 << 10
)

// Scan implements KV.
func (s *kvService) Scan(req *pb.ScanRequest, stream grpc.ServerStreamingServer[pb.ScanResponse]) error {
	return s.serveStream(stream.Context(), telemetry.MethodScan, func(conn *connection) error {
		sc, err := newScan(s.Server, req)
		if err != nil {
			return err
		}
		// A scan holds two pages in memory until the client has taken them, or its snapshot is
		// ended: the one that is filled, and the buffer of the one that is sent.
		sc.held, sc.access = max(sc.pageBytes+pb.BufferBytes(sc.pageBytes), s.admission.scanBytesMin()), accessOf(stream.Context())
		if err := s.admit(stream.Context(), conn, kindRead, shareScans, sc.held); err != nil {
			return err
		}
		if sc.executor, err = s.takeExecutor(); err != nil {
			s.admission.leave(conn, shareScans, sc.held)
			return err
		}
		sc.executor.access = sc.access
		return sc.ended(sc.run(stream))
	})
}

// scan is one Scan request: its plan, and the page that is being filled.
type scan struct {
	// Constant.
	server    *Server
	options   mvcc.ScanOptions
	at        keys.Epoch // asked for; zero: newest
	atTime    uint64     // asked for instead; zero: none
	bounds    uint32     // hash of the range, for tokens
	pageBytes int
	countOnly bool
	tokens    pb.ResumeTokens
	executor  *executor
	access    *access
	snapshot  *openSnapshot

	held      int    // bytes with which the scan is admitted
	remaining uint64 // entries that may still be returned
	cursor    *mvcc.Cursor
	scanMemory
	last []byte // last key covered
	scanTokens
	scanTimes
}

// scanMemory is where the page is.
type scanMemory struct {
	page  scanEncoding
	size  int // of the page when it is encoded, at most, but for the key in its token
	pages *scanPages
}

// scanTokens is what a scan keeps for its resume tokens.
type scanTokens struct {
	tokenBuf  []byte
	handedOut bool // the client may have a token
}

// scanTimes says where the time of a scan went.
type scanTimes struct {
	later     bool                    // the first page has been sent
	only      bool                    // the page is the first, and the last
	details   details                 // of the goroutine that sends
	collected atomic.Pointer[details] // by a scan that has ended
}

// streamEndError is the end of a stream that says where its time went. serveStream unwraps it.
type streamEndError struct {
	err     error
	details *details // nil: none
	times   commitTimes
	epoch   uint64
}

func (*streamEndError) Error() string { return "stream ended" }

// ended adds the details to an error of run. The goroutine of a scan that was ended from outside may still collect some.
func (sc *scan) ended(err error) error {
	if d := sc.collected.Load(); d != nil {
		return &streamEndError{err: err, details: d}
	}
	return err
}

// detailsOf takes what the body of a stream returns apart.
func (e *requestEnd) detailsOf(err error) (*details, error) {
	if s, ok := err.(*streamEndError); ok { //nolint:errorlint // made by the stream, and returned as it is
		e.times, e.epoch = s.times, s.epoch
		return s.details, s.err
	}
	return nil, err
}

func newScan(s *Server, req *pb.ScanRequest) (*scan, error) {
	b, err := toBounds(req.Range)
	if err != nil {
		return nil, err
	}
	sc := &scan{
		server: s, at: keys.Epoch(req.SnapshotEpoch), atTime: req.SnapshotTimeUs, bounds: hashBounds(b), countOnly: req.CountOnly, remaining: req.Limit, tokens: req.Tokens,
		options:   mvcc.ScanOptions{Lower: b.lower, Upper: b.upper, Reverse: req.Reverse, KeysOnly: req.KeysOnly || req.CountOnly, Limit: scanLimit(req.Limit)},
		pageBytes: scanPageBytesDefault, scanMemory: scanMemory{pages: &scanPages{admission: &s.admission}},
	}
	if req.PageBytes > 0 {
		sc.pageBytes = int(min(req.PageBytes, scanPageBytesMax))
	}
	if sc.remaining == 0 {
		sc.remaining = math.MaxUint64
	}
	switch {
	case req.Tokens < pb.ResumeTokens_RESUME_TOKENS_UNSPECIFIED || req.Tokens > pb.ResumeTokens_RESUME_TOKENS_ALL:
		return nil, invalid("tokens", fmt.Sprintf("%d is not known to this server", req.Tokens))
	case len(req.ResumeToken) > 0:
		return sc, sc.resume(req)
	case req.ResumeAtNewest:
		return nil, invalid("resume_at_newest", "needs a resume token")
	}
	return sc, nil
}

// scanLimit is a request's limit as an int. The engine uses it as a hint for the number of leaves
// to read together, which only small limits change.
func scanLimit(entries uint64) int { return int(min(entries, math.MaxInt32)) }

// resume narrows the range to the keys after the token.
func (sc *scan) resume(req *pb.ScanRequest) error {
	// Keys in quarantine may be longer than the limit of keys, so the limit is not checked here.
	t, err := decodeToken(req.ResumeToken, sc.server.storeID, max(sc.server.limits.KeyBytes, sc.server.limits.BatchBytes))
	switch {
	case err != nil:
		return err
	case req.SnapshotEpoch != 0 || req.SnapshotTimeUs != 0:
		return invalid("snapshot_epoch", "must be 0 with a resume token, which contains its epoch")
	case t.bounds != sc.bounds || t.reverse != sc.options.Reverse || !within(t.last, sc.options.Lower, sc.options.Upper):
		return invalidToken("belongs to another range or direction")
	}
	if !req.ResumeAtNewest {
		sc.at = t.epoch
	}
	if sc.options.Reverse {
		sc.options.Upper = t.last
	} else {
		sc.options.Lower = append(append(make([]byte, 0, len(t.last)+1), t.last...), 0) // the smallest key after it
	}
	return nil
}

// run sends pages until the range or the limit is exhausted. While a page waits for the client, the
// scan has its snapshot and the page, and no other resource of the engine.
//
// While the stream is open, its own snapshot keeps the epoch of its tokens readable. A scan that
// has sent a token takes a snapshot lease when it ends, unless its snapshot was ended by the timeout or an operator.
// The lease is needed even after the last page was sent, because the client may have read only the
// first. Scans of one epoch share a lease.
//
// Sending the first page does not wait for the client, because the transport takes at least one
// message. So most scans need no second goroutine. Each further page is sent when the client's windows
// have taken the one before: the scan is admitted with two pages.
func (sc *scan) run(stream grpc.ServerStreamingServer[pb.ScanResponse]) error {
	if err := sc.begin(stream.Context()); err != nil {
		sc.end()
		return err
	}
	more, err := sc.sendPage(stream)
	if !more || err != nil {
		sc.end()
		return sc.snapshot.reason(err)
	}
	sc.later = true
	return sc.snapshot.serve(func() error {
		defer sc.end()
		for more && err == nil {
			more, err = sc.sendPage(stream)
		}
		if err == nil {
			err = sc.awaitLast(stream.Context())
		}
		return err
	})
}

// awaitLast waits until the client has taken the last page, for which it has as long as for the others.
func (sc *scan) awaitLast(ctx context.Context) error {
	start := sc.server.clock.now()
	sc.snapshot.wait()
	err := transport.AwaitSent(ctx, 0)
	_ = sc.snapshot.resume() // all pages are sent
	sc.details.client += sc.server.clock.now() - start
	return err
}

// begin opens the snapshot and the cursor.
func (sc *scan) begin(ctx context.Context) (err error) {
	x := sc.executor.session
	sc.executor.ctx = ctx // what is read of the log for a time counts for its connection
	sc.executor.named(sc.options.Lower)
	if sc.atTime != 0 {
		if sc.at != 0 {
			return errEpochAndTime
		}
		if sc.at, err = sc.executor.epochOf(ctx, sc.atTime); err != nil {
			return err
		}
	}
	if sc.at, err = x.OpenSnapshot(sc.at); err != nil {
		return err
	}
	sc.snapshot = sc.server.openSnapshot(ctx, pb.SnapshotInfo_KIND_SCAN, sc.at, x.CloseSnapshot)
	sc.snapshot.yields = sc.yields
	sc.options.Context, sc.options.Admit = sc.snapshot.ctx, sc.admit
	sc.cursor, err = x.Scan(sc.options)
	return err
}

// end releases everything that the scan has taken.
func (sc *scan) end() {
	if sc.snapshot != nil && sc.snapshot.close() {
		sc.leaseSnapshot()
	}
	if sc.executor.takeDetails(&sc.details); sc.details != (details{}) {
		d := sc.details
		sc.collected.Store(&d)
	}
	sc.executor.release()
	sc.pages.end(sc.access.conn, sc.held)
}

// sendPage sends the next page, and reports whether there are more to send.
func (sc *scan) sendPage(stream grpc.ServerStreamingServer[pb.ScanResponse]) (more bool, err error) {
	if more, err = sc.nextPage(sc.snapshot.ctx); err != nil {
		return false, err
	}
	if err := sc.access.again(); err != nil {
		return false, err
	}
	sc.access.sent(&sc.page)
	sc.snapshot.wait()
	more = more && sc.remaining > 0
	sc.only = !sc.later && !more
	err = sc.send(stream)
	if ended := sc.snapshot.resume(); err == nil {
		err = ended
	}
	switch {
	case err != nil || !more:
	case sc.server.drain.active.Load():
		err = errShuttingDown
	case sc.yields():
		err = errOverloaded
	}
	return more, err
}

// yields reports whether the scan ends because it has been in the slot for too long, and others want that. It is called between two pages, and while
// one waits for the client: what goes on with a token needs the lease before the snapshot is closed.
func (sc *scan) yields() bool {
	a := &sc.server.admission
	if !a.words[shareScans].large.overstays(sc.access.conn, int64(sc.held), a.slotTime) {
		return false
	}
	sc.leaseSnapshot()
	return true
}

// send sends the page. The first page does not wait for the client, and its scan is not slowed down by clock reads.
func (sc *scan) send(stream grpc.ServerStreamingServer[pb.ScanResponse]) error {
	if !sc.later {
		return sc.sendCounted(stream)
	}
	start := sc.server.clock.now()
	err := sc.sendCounted(stream)
	sc.details.client += sc.server.clock.now() - start
	return err
}

// acknowledge waits until what the page reveals is durable.
func (sc *scan) acknowledge(ctx context.Context, w ackWait) error {
	if w.ready(sc.server.store) {
		return nil
	}
	start := sc.server.clock.now()
	err := w.wait(ctx, sc.server.store)
	sc.details.sync += sc.server.clock.now() - start
	return err
}

// leaseSnapshot takes a snapshot lease on the scan's epoch for a client that continues with a
// token. If its address has too many, the client gets SNAPSHOT_GONE for the oldest, and may continue
// at the newest epoch.
func (sc *scan) leaseSnapshot() {
	if sc.handedOut {
		sc.server.store.LeaseSnapshot(sc.at, networkOf(sc.snapshot.ctx), sc.server.config.SnapshotLeaseTTL)
	}
}

// bringsToken reports whether the page has a token with which the client can continue.
func (sc *scan) bringsToken(more bool) bool {
	switch sc.tokens {
	case pb.ResumeTokens_RESUME_TOKENS_INNER:
		return more && sc.remaining > 0
	case pb.ResumeTokens_RESUME_TOKENS_ALL:
		return more
	}
	return false
}

// nextPage fills the page and waits until what it reveals is durable.
func (sc *scan) nextPage(ctx context.Context) (more bool, err error) {
	if more, err = sc.fill(ctx); err != nil {
		return false, err
	}
	if err := sc.grow(cap(sc.page.buf) + pb.BufferBytes(sc.size+len(sc.last))); err != nil {
		return false, err
	}
	await := sc.cursor.Await()
	sc.cursor.Pause()
	if err := sc.acknowledge(ctx, ackRead(await)); err != nil {
		return false, err
	}
	sc.tokenBuf = sc.tokenBuf[:0]
	if sc.bringsToken(more) {
		sc.handedOut = true
		sc.tokenBuf = appendToken(sc.tokenBuf, token{epoch: sc.at, reverse: sc.options.Reverse, last: sc.last, bounds: sc.bounds, store: sc.server.storeID})
	}
	sc.page.end(sc.at, sc.tokenBuf)
	return more, nil
}

// grow raises the bytes with which the scan is admitted, if they are fewer: a page has at least one
// entry, however large its value is.
func (sc *scan) grow(bytes int) error {
	if bytes <= sc.held {
		return nil
	}
	a := &sc.server.admission
	if a.words[shareScans].large.change(sc.access.conn, int64(sc.held), int64(bytes)) { // it keeps its turn
		sc.held = bytes
		return nil
	}
	a.leave(sc.access.conn, shareScans, sc.held)
	if !a.enter(sc.access.conn, shareScans, bytes) {
		sc.held = 0
		a.must(shareScans)
		return errOverloaded
	}
	sc.held = bytes
	return nil
}

// admit counts a large value before it is read, with its place in the page and in the buffer that is sent.
func (sc *scan) admit(bytes int) error {
	if bytes < admitStep {
		return nil
	}
	return sc.grow(sc.page.bytesWith(bytes) + pb.BufferBytes(sc.size+bytes))
}

// fill makes the next page, and reports whether the range may continue after it.
func (sc *scan) fill(ctx context.Context) (more bool, err error) {
	sc.page.reuse(sc.pageBytes)
	sc.size = scanPageOverhead
	for entry := 0; ; {
		if sc.remaining == 0 {
			if sc.tokens != pb.ResumeTokens_RESUME_TOKENS_ALL {
				return false, nil
			}
			return sc.cursor.Next(), sc.cursor.Err() // is there a next entry?
		}
		// Another entry of the same size would make the page larger than it may be.
		if sc.countOnly && sc.page.count == scanCountPage || !sc.countOnly && sc.page.count > 0 && sc.size+entry+len(sc.last) > sc.pageBytes {
			return true, nil
		}
		if sc.page.count%scanCheckEvery == 0 && ctx.Err() != nil {
			return false, ctx.Err()
		}
		if !sc.cursor.Next() {
			return false, sc.cursor.Err()
		}
		sc.remaining--
		sc.last = append(sc.last[:0], sc.cursor.Key()...)
		if sc.countOnly {
			sc.page.count++
			continue
		}
		f, err := sc.cursor.Metadata()
		if err != nil {
			return false, err
		}
		entry = sc.add(sc.cursor.Key(), sc.cursor.Value(), sc.cursor.Epoch(), &f)
		sc.size += entry
	}
}

// add adds one entry to the page and returns what it counts.
func (sc *scan) add(key, value []byte, epoch keys.Epoch, f *mvcc.Metadata) int {
	sc.page.add(key, value, epoch, f, sc.pageBytes)
	size := len(key) + len(value) + scanEntryOverhead
	if f.ExpiresAt != 0 || f.Lease != 0 {
		size += 2 * binary.MaxVarintLen64
	}
	return max(size, scanEntryBytes)
}

// entryBytes is what an entry counts in a page.
func entryBytes(key, value []byte) int { return max(len(key)+len(value), scanEntryBytes) }
