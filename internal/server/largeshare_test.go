package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/transport"
)

// TestUnreadLargeAnswersLeaveRoomToOthers: a connection that takes nothing of its only answer leaves room to others, too, whatever the size of
// the answer is, and answers to writes always find some.
func TestUnreadLargeAnswersLeaveRoomToOthers(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.MessageTimeout, c.Limits.InflightBytes = time.Hour, 64*config.MiB })
	h.putLarge(t, 1, 4<<20) // a third of the share
	h.putValue(t, "medium", 100<<10)
	ctx := testContext(t)
	share := int64(h.admission.words[shareAnswers].limit.bytes)
	for i := range int64(3) {
		ask(ctx, t, h.dialDeaf(t, fromAddress(clientAddress())), "Get", getLarge) // of one client they leave a quarter
		eventually(t, "the answer waits", func() bool { _, _, answers := h.admission.inflight(); return answers >= (i+1)*(4<<20) })
	}
	if _, _, answers := h.admission.inflight(); answers < share {
		t.Fatalf("%d bytes of answers wait, of a share of %d: the test tests nothing", answers, share)
	}
	_, err := h.kv.Get(ctx, getLarge)
	failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)
	for range 10 {
		if _, err := h.kv.Get(ctx, &pb.GetRequest{Key: []byte("medium")}); err != nil {
			t.Fatalf("a read of 100 KiB: %v", err)
		}
		increment := &pb.Invocation{Key: []byte("n"), Operation: &pb.Invocation_Increment{Increment: &pb.Increment{Delta: 1}}}
		if _, err := h.kv.Invoke(ctx, &pb.InvokeRequest{Invocation: increment}); err != nil {
			t.Fatalf("an increment: %v", err)
		}
	}
	defer h.fillShare(shareAnswers, h.admission.words[shareAnswers].word.Load()&admissionBytes)() // of it nothing is free
	list := []*pb.Operation{putOperation("k", "v")}
	if _, err := pb.NewTransactionServiceClient(h.conn).Execute(ctx, &pb.ExecuteRequest{ThenOperations: list}); err != nil {
		t.Errorf("a transaction while the share has no room: %v", err)
	}
}

// TestALargeRequestTakesNothingOfItsShare: one that is larger than its share is executed beside others, and only another as large is refused.
func TestALargeRequestTakesNothingOfItsShare(t *testing.T) {
	h := mustStart(t, withDirect, func(c *config.Config) {
		c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 16*config.MiB, 8*config.MiB, 8*config.MiB
	})
	ctx := testContext(t)
	writes := &h.admission.words[shareLargeWrites]
	large := func(n int) *pb.BatchWriteRequest {
		m := &pb.BatchWriteRequest{Durability: pb.Durability_DURABILITY_SYNC}
		for i := range n {
			m.Mutations = append(m.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Append(nil, i), Value: []byte("v")})
		}
		return m
	}
	put := func(size int) error {
		_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Value: make([]byte, size), Durability: pb.Durability_DURABILITY_ASYNC})
		return err
	}
	const most = 30_000 // 384 bytes each: three times the share
	other := new(connection)
	if !h.admission.enter(other, shareLargeWrites, 3*int(writes.limit.bytes)) {
		t.Fatal("it is refused while the share is empty")
	}
	for _, size := range []int{20 << 10, 50 << 10, 1 << 20} {
		if err := put(size); err != nil {
			t.Errorf("%d bytes beside a large request: %v", size, err)
		}
	}
	_, err := h.kv.BatchWrite(ctx, large(most))
	failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)
	h.admission.leave(other, shareLargeWrites, 3*int(writes.limit.bytes))

	held := h.admission.enter(other, shareLargeWrites, int(writes.limit.bytes/2)) // small ones keep no large one out
	if _, err := h.kv.BatchWrite(ctx, large(most)); err != nil || !held {
		t.Errorf("the largest request beside others: %v", err)
	}
	h.admission.leave(other, shareLargeWrites, int(writes.limit.bytes/2))
	eventually(t, "all is given back", func() bool { n, bytes, _ := h.admission.inflight(); return n == 0 && bytes == 0 })
}

// TestALargeRequestGoesBackToItsShare when less of it is left, there is room, and another needs the slot. What it makes is in the slot with it.
func TestALargeRequestGoesBackToItsShare(t *testing.T) {
	const mib = 1 << 20
	var a admission
	a.init(10, 16*mib) // 4 MiB of large writes
	w, one, other := &a.words[shareLargeWrites], new(connection), new(connection)
	want := func(what string, inShare, beside int64) {
		t.Helper()
		if got := int64(w.word.Load() & admissionBytes); got != inShare || w.large.bytes() != beside {
			t.Errorf("%s: %d bytes in the share and %d beside it, want %d and %d", what, got, w.large.bytes(), inShare, beside)
		}
	}
	if !a.enter(one, shareLargeWrites, 10*mib) || !a.enter(other, shareLargeWrites, 2*mib) {
		t.Fatal("refused")
	}
	want("a large one", 2*mib, 10*mib)
	a.shrink(one, shareLargeWrites, 10*mib, 2*mib)
	want("less of it is left", 2*mib, 2*mib)
	if a.enter(other, shareLargeWrites, 10*mib) {
		t.Error("another has the slot, although there is no room in the share")
	}
	a.leave(other, shareLargeWrites, 2*mib)
	a.shrink(one, shareLargeWrites, 2*mib, mib)
	want("nothing else is in the share", 0, mib)
	if !a.enter(other, shareLargeWrites, 10*mib) {
		t.Error("the rest, which has room in the share, keeps the slot")
	}
	want("another needs the slot", mib, 10*mib)
	a.leave(other, shareLargeWrites, 10*mib)
	if !a.returnHeld(shareLargeWrites, &largeHeld{other, mib}) {
		t.Error("there is no room for it in the share")
	}
	want("what goes back has ended meanwhile", mib, 0)
	if !a.enterBeside(one, shareLargeWrites, mib, 5*mib) {
		t.Fatal("what it makes is refused")
	}
	want("what a small one makes", 0, 6*mib)
	a.leaveBeside(one, shareLargeWrites, mib, 5*mib)
	want("it is released", 0, mib)
	a.leave(one, shareLargeWrites, mib)
	if n, bytes, _ := a.inflight(); n != 0 || bytes != 0 || one.bytes(shareLargeWrites) != 0 {
		t.Errorf("%d requests, %d bytes", n, bytes)
	}
}

// TestAnEndedConnectionFreesTheLargeSlot, of answers and of the pages of scans.
func TestAnEndedConnectionFreesTheLargeSlot(t *testing.T) {
	const mib = 1 << 20
	var a admission
	a.init(10, 16*mib) // 4 MiB of scans, 3 MiB of answers
	conn := new(connection)
	if _, err := a.charge(conn, 5*mib, false); err != nil || !a.enter(conn, shareScans, 6*mib) {
		t.Fatal(err)
	}
	pages := &scanPages{admission: &a}
	page := pages.add(5 * mib)
	pages.end(conn, 6*mib)
	if a.words[shareScans].large.bytes() != 5*mib || a.words[shareAnswers].large.bytes() != 5*mib {
		t.Fatal("they are not in the slots")
	}
	conn.end(&a)
	page.counted.sent()
	if n, bytes, answers := a.inflight(); n != 0 || bytes != 0 || answers != 0 || a.words[shareAnswers].word.Load() != 0 {
		t.Errorf("%d requests of %d bytes, %d bytes of answers", n, bytes, answers)
	}
}

// ask sends a request, and opens no window for its answer.
func (c *rawClient) ask(stream uint32, method string, req interface{ MarshalVT() ([]byte, error) }) {
	c.t.Helper()
	message, err := req.MarshalVT()
	if err != nil {
		c.t.Fatal(err)
	}
	c.begin(stream, method, "120S")
	c.send(frame(frameData, flagEndStream, stream, append(prefixed(len(message))[:grpcPrefixBytes], message...)))
}

// TestALargeAnswerMustBeTakenFasterWhileOthersWait: a client that takes as little of it as it must of others keeps the slot for four times
// --message-timeout, although it takes something all the time.
func TestALargeAnswerMustBeTakenFasterWhileOthersWait(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		const timeout = 2 * time.Second
		h := mustStart(t, with, func(c *config.Config) { c.MessageTimeout = timeout })
		for _, key := range []string{"large/000", "other"} {
			h.commitInStore(t, key, make([]byte, 16<<20))
		}
		slow := h.dialRaw(t)
		slow.ask(1, pb.KVService_Get_FullMethodName, getLarge)
		slot := &h.admission.words[shareAnswers].large
		eventually(t, "it has the slot", func() bool { return slot.bytes() >= 16<<20 })
		began, stop := time.Now(), make(chan struct{})
		var taking sync.WaitGroup
		defer taking.Wait()
		defer func() { _ = slow.Close() }() // which the server has closed
		defer close(stop)
		taking.Go(func() { _, _ = io.Copy(io.Discard, slow.Conn) })
		taking.Go(func() {
			more := bytes.Join([][]byte{windowOf(0, 2*sentStep), windowOf(1, 2*sentStep)}, nil)
			for {
				select {
				case <-stop:
					return
				case <-time.After(timeout / 4):
				}
				if _, err := slow.Write(more); err != nil {
					return
				}
			}
		})
		eventually(t, "another has the slot", func() bool {
			_, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte("other")})
			if err != nil {
				time.Sleep(claimTimeMin / 2) // its claim stands
			}
			return err == nil // on a busy machine it may be too slow, too
		})
		if took := time.Since(began); took < slotParts*timeout {
			t.Errorf("after %v", took)
		} else {
			t.Logf("after %v", took)
		}
		if n := h.connections.violations[transport.ViolationUnread].Load(); n == 0 {
			t.Error("the slow connection was not closed")
		}
	})
}

// TestLargeRequestsOfConnectionsTakeTurns: a connection that sends one after the other, without a pause, does not keep those of others out.
func TestLargeRequestsOfConnectionsTakeTurns(t *testing.T) {
	testseed.SkipUnderRace(t)
	h := mustStart(t, withDirect, func(c *config.Config) {
		c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 16*config.MiB, 8*config.MiB, 8*config.MiB
	})
	ctx, cancel := context.WithCancel(testContext(t))
	batch := &pb.BatchWriteRequest{Durability: pb.Durability_DURABILITY_ASYNC}
	for i := range 15_000 { // 384 bytes each: more than the share
		batch.Mutations = append(batch.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Append(nil, i), Value: []byte("v")})
	}
	var greedy sync.WaitGroup
	defer greedy.Wait()
	defer cancel()
	var done atomic.Int64
	for range 3 {
		greedy.Go(func() {
			for ctx.Err() == nil {
				if _, err := h.kv.BatchWrite(ctx, batch); err == nil {
					done.Add(1)
				}
			}
		})
	}
	other := pb.NewKVServiceClient(h.dial(t))
	eventually(t, "some were executed", func() bool { return done.Load() > 5 })
	for range 3 {
		refused, before := 0, int64(0)
		for {
			_, err := other.BatchWrite(ctx, batch)
			if err == nil {
				break
			}
			if status.Code(err) != codes.ResourceExhausted {
				t.Fatal(err)
			}
			if refused++; refused == 1 {
				before = done.Load()
			}
			time.Sleep(retryOverloaded)
		}
		if n := done.Load() - before; refused > 0 && n > 3 {
			t.Errorf("%d of a connection were executed while that of another waited, which was refused %d times", n, refused)
		}
	}
}

// TestAnswersToWritesExceedTheirShareByAnEighth, and by what of one is not counted before it commits.
func TestAnswersToWritesExceedTheirShareByAnEighth(t *testing.T) {
	const size = 48 << 10
	h := mustStart(t, withDirect, func(c *config.Config) { c.MessageTimeout, c.Limits.InflightBytes = time.Hour, 64*config.MiB })
	h.putLarge(t, 1, size)
	defer h.fillShare(shareAnswers, 0)()
	w, ctx := &h.admission.words[shareAnswers], testContext(t)
	touch := &pb.InvokeRequest{Invocation: &pb.Invocation{Key: getLarge.Key, Operation: &pb.Invocation_Touch{Touch: true}, TtlMs: 3_600_000, ReturnOld: true}}
	invoked := func() uint64 { return h.observer.requests.Totals(telemetry.MethodInvoke).Count }
	for i := range uint64(60) { // two of a connection: it may have no more
		c := h.dialRaw(t)
		c.send(frame(4, 0, 0, []byte{0, 4, 0, 0, 0, 0})) // no window
		c.ask(1, pb.KVService_Invoke_FullMethodName, touch)
		eventually(t, "it is executed, or refused", func() bool { return invoked() == i+1 })
	}
	over, failed := w.word.Load()&admissionBytes-w.limit.bytes, h.observer.requests.Totals(telemetry.MethodInvoke).Failed
	if eighth := w.limit.bytes / mustPart; over < eighth || over > eighth+admitStep || failed == 0 {
		t.Errorf("answers to writes exceed their share by %d bytes, want %d to %d; %d were refused", over, eighth, eighth+admitStep, failed)
	}
	if _, err := h.kv.Get(ctx, getLarge); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a read beyond the share: %v", err)
	}
}

// TestAnswersToWritesOfAConnectionLeaveRoomToThoseOfOthers, beyond the share, too.
func TestAnswersToWritesOfAConnectionLeaveRoomToThoseOfOthers(t *testing.T) {
	var a admission
	a.init(100, 64<<20)
	one, w := new(connection), &a.words[shareAnswers]
	w.word.Add(w.limit.bytes)
	for range 100 {
		if a.answersFull(one) {
			break
		}
		if _, err := a.charge(one, 32<<10, true); err != nil {
			t.Fatal(err)
		}
	}
	if n := one.answerBytes(); n != mustOwn+32<<10 {
		t.Errorf("a connection has %d bytes", n)
	}
	if a.answersFull(new(connection)) {
		t.Error("another has none")
	}
}

// TestAScanInTheSlotGivesItUpBetweenPages once others want it, and goes on in its turn.
func TestAScanInTheSlotGivesItUpBetweenPages(t *testing.T) {
	h := mustStart(t, withDirect, func(c *config.Config) {
		c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 16*config.MiB, 8*config.MiB, 8*config.MiB
		c.MessageTimeout = 500 * time.Millisecond
	})
	const values = 4
	for i := range values {
		h.commitInStore(t, fmt.Sprint(i), make([]byte, 3<<20+i*(100<<10))) // twice: half as much again as the share
	}
	ctx := testContext(t)
	scan := func(req *pb.ScanRequest, pause time.Duration) (pages int, token []byte, err error) {
		stream, err := h.kv.Scan(ctx, req)
		for err == nil {
			var page *pb.ScanResponse
			if page, err = stream.Recv(); err == nil {
				if pages++; pages == 1 {
					time.Sleep(pause)
				}
				token = page.ResumeToken
			}
		}
		return pages, token, err
	}
	pause := h.admission.slotTime + h.config.MessageTimeout
	want, _, err := scan(&pb.ScanRequest{PageBytes: 1}, pause)
	if want < values || !errors.Is(err, io.EOF) {
		t.Errorf("a slow scan that no other waits for: %d pages, %v", want, err)
	}
	stop := make(chan struct{})
	var others sync.WaitGroup
	defer others.Wait()
	defer close(stop)
	others.Go(func() {
		for other := new(connection); ; {
			if h.admission.enter(other, shareScans, 6<<20) {
				h.admission.leave(other, shareScans, 6<<20)
			}
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	eventually(t, "a scan that is not slow has all pages in one turn", func() bool {
		began := time.Now()
		pages, _, err := scan(&pb.ScanRequest{PageBytes: 1}, 0)
		if pages > 1 && pages < want && time.Since(began) < h.admission.slotTime {
			t.Fatalf("a scan lost the slot after %d pages: %v", pages, err)
		}
		return pages == want
	})
	all, ended, token := 0, 0, []byte(nil)
	eventually(t, "all pages have come", func() bool {
		pages, last, err := scan(&pb.ScanRequest{PageBytes: 1, ResumeToken: token, Tokens: pb.ResumeTokens_RESUME_TOKENS_INNER}, pause)
		if all += pages; len(last) > 0 {
			token, pause = last, 0
		}
		switch {
		case errors.Is(err, io.EOF):
			return true
		case status.Code(err) != codes.ResourceExhausted && status.Code(err) != codes.Canceled: // it ended in the pause, and nothing more was taken
			t.Fatal(err)
		case pages > 0:
			ended++
		}
		return false
	})
	if all != want || ended == 0 {
		t.Errorf("%d pages came; the scan was ended %d times", all, ended)
	}
}

// TestAnUnreadScanGivesUpTheSlot once others want it, whether what waits for its client counts or not, and can be resumed where it was.
func TestAnUnreadScanGivesUpTheSlot(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with, func(c *config.Config) {
			c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 16*config.MiB, 8*config.MiB, 8*config.MiB
			c.MessageTimeout, c.SnapshotTimeout = 200*time.Millisecond, 0
		})
		for i := range 3 {
			h.commitInStore(t, fmt.Sprint("large/", i), make([]byte, 3<<20)) // twice: half as much again as the share
		}
		h.commitInStore(t, "small/", make([]byte, 3<<20))
		for i := range 50 {
			h.commitInStore(t, fmt.Sprint("small/", i), make([]byte, pageCountedMin/2)) // more than a window, and what waits for it
		}
		other := new(connection)
		enters := func() bool {
			if !h.admission.enter(other, shareScans, 6<<20) {
				return false
			}
			h.admission.leave(other, shareScans, 6<<20)
			return true
		}
		for _, test := range []struct {
			prefix string
			reads  bool // in time, what was sent before
		}{{"small/", false}, {"large/", true}, {"large/", false}} {
			at, began := keys.Epoch(h.commitInStore(t, "epoch", nil)), time.Now()
			stream := h.startScan(t, &pb.ScanRequest{Range: &pb.KeyRange{Prefix: []byte(test.prefix)}, PageBytes: 1, Tokens: pb.ResumeTokens_RESUME_TOKENS_INNER})
			eventually(t, "it ends, and its token remains good", func() bool {
				enters()
				return slices.ContainsFunc(h.store.SnapshotLeases(), func(l pin.Lease) bool { return l.Epoch == at })
			})
			if took := time.Since(began); took < h.admission.slotTime {
				t.Errorf("%s: it ended after %v", test.prefix, took)
			}
			if test.reads {
				if err := untilError(stream); status.Code(err) != codes.Canceled { // on a busy machine it may be too slow
					failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)
				}
			}
			eventually(t, "another has the slot", enters)
		}
	})
}

// TestPagesInTheSlotAreOverdue once their scan has ended, and others want the slot.
func TestPagesInTheSlotAreOverdue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const mib = 1 << 20
		a := admission{slotTime: time.Minute}
		a.init(10, 16*mib) // 4 MiB of scans
		conn, pages := new(connection), &scanPages{admission: &a}
		if !a.enter(conn, shareScans, 6*mib) || a.enter(new(connection), shareScans, 6*mib) {
			t.Fatal("the slot has not one owner")
		}
		time.Sleep(2 * a.slotTime)
		page := pages.add(5 * mib)
		if conn.isOverdue(&a, 0) {
			t.Error("while the scan goes on")
		}
		pages.end(conn, 6*mib)
		time.Sleep(a.slotTime)
		if conn.isOverdue(&a, 0) {
			t.Error("before its time")
		}
		if time.Sleep(time.Nanosecond); !conn.isOverdue(&a, 0) {
			t.Error("its page may wait for ever")
		}
		if page.counted.sent(); conn.isOverdue(&a, 0) {
			t.Error("it is sent")
		}
	})
}
