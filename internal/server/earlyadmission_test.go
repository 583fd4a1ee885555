package server

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

// earlyBytes is the size of messages that are large for each share of earlyServer.
const earlyBytes = 1 << 20

func earlyServer(t *testing.T, with func(*config.Config)) (*harness, *grpc.ClientConn) {
	t.Helper()
	h := mustStart(t, with, func(c *config.Config) { c.Limits.InflightBytes = 64 * config.MiB })
	return h, h.dialEncoded(t)
}

func (h *harness) dialEncoded(t *testing.T) *grpc.ClientConn {
	t.Helper()
	return h.dial(t, grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encodedCodec{pb.NewCodec()})))
}

// TestLargeRequestsAreRefusedBeforeTheyAreDecoded: a large request for which there is no room is refused as that, and not for what a decoder would find:
// the encoded and the decoded message are not in memory beside the request that has the room.
func TestLargeRequestsAreRefusedBeforeTheyAreDecoded(t *testing.T) {
	h, conn := earlyServer(t, func(c *config.Config) { c.Transport = config.TransportGRPC })
	malformed := bytes.Repeat([]byte{1<<3 | 2, 0x7f}, earlyBytes)
	for method, share := range map[string]share{
		"KVService/BatchWrite":       shareLargeWrites,
		"KVService/InvokeAll":        shareLargeWrites,
		"KVService/BatchGet":         shareLargeReads,
		"TransactionService/Execute": shareLargeWrites,
	} {
		release := h.fillShare(share, 0)
		err := invokeEncoded(testContext(t), conn, method, malformed, false)
		release()
		t.Log(method)
		failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)
	}
	h.mustAdmitNothing(t)
}

// mustAdmitNothing checks that no request is admitted any more, decoded or not, by any count.
func (h *harness) mustAdmitNothing(t *testing.T) {
	t.Helper()
	h.mustDecodeNothing(t)
	eventually(t, "no request is admitted", func() bool {
		requests, bytes, _ := h.admission.inflight()
		e := &h.admission.early
		e.mu.Lock()
		defer e.mu.Unlock()
		return requests == 0 && bytes == 0 && e.count.Load() == 0 && len(e.held) == 0
	})
}

// TestRequestsThatAreAdmittedEarlyLeaveTheirShares, and their connections' parts of them, however they end: executed, refused, smaller or larger once they
// are decoded, damaged, cancelled, without an end.
func TestRequestsThatAreAdmittedEarlyLeaveTheirShares(t *testing.T) {
	testseed.SkipUnderRace(t)
	const callers, each = 6, 40
	seed := testseed.Base(t)
	value := protowire.AppendBytes([]byte{2<<3 | 2}, make([]byte, earlyBytes))
	small := protowire.AppendBytes([]byte{1<<3 | 2}, []byte("k"))
	messages := [][]byte{
		slices.Concat(small, value),
		slices.Concat(small, value, []byte{2<<3 | 2, 1, 'v'}),                                            // of a put only the last value is decoded
		bytes.Repeat(protowire.AppendBytes([]byte{1<<3 | 2}, small), earlyBytes/5),                       // many operations take more once they are decoded
		bytes.Repeat(protowire.AppendBytes([]byte{1<<3 | 2}, append(small, make([]byte, 500)...)), 2000), // damaged operations
	}
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h, _ := earlyServer(t, with)
		var all sync.WaitGroup
		for caller := range callers {
			conn := h.dialEncoded(t)
			all.Go(func() {
				random := rand.New(rand.NewPCG(seed, uint64(caller)))
				for range each {
					message := messages[random.IntN(len(messages))]
					method := []string{"KVService/Put", "KVService/BatchWrite", "KVService/InvokeAll", "KVService/BatchGet", "TransactionService/Execute"}[random.IntN(5)]
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(100))*time.Millisecond)
					stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/epochkv.v1."+method)
					for range 1 + random.IntN(8)/7 {
						if err == nil {
							err = stream.SendMsg(&message)
						}
					}
					if err == nil && random.IntN(4) > 0 {
						_ = stream.CloseSend()
					}
					if err == nil {
						_ = stream.RecvMsg(new(pb.PutResponse))
					}
					cancel()
				}
				put := slices.Concat(small, value)
				eventually(t, "the connection has its room again", func() bool {
					return invokeEncoded(t.Context(), conn, "KVService/Put", put, false) == nil
				})
			})
		}
		all.Wait()
		h.mustAdmitNothing(t)
	})
}

// TestARequestThatWasAdmittedEarlyHasItsSizeOnce: decoded, it counts what it takes then, in the share or in the slot.
func TestARequestThatWasAdmittedEarlyHasItsSizeOnce(t *testing.T) {
	for _, room := range []uint64{0, 16 << 20} { // without room it has the slot
		var s Server
		s.admission.init(100, 64<<20)
		w, conn := &s.admission.words[shareLargeWrites], new(connection)
		full := w.limit.bytes - min(room, w.limit.bytes)
		w.word.Add(full)
		ctx := context.Background()
		for _, size := range []int{earlyBytes, earlyBytes / 2, 2 * earlyBytes} {
			request := new(pb.BatchWriteRequest)
			if err := s.admit(ctx, conn, kindWrite, shareLargeWrites, earlyBytes); err != nil {
				t.Fatal(err)
			}
			s.admission.early.put(request, earlyAdmission{conn, shareLargeWrites, earlyBytes})
			if err := s.admitDecoded(ctx, conn, kindWrite, shareLargeWrites, size, request); err != nil {
				t.Fatalf("room %d, size %d: %v", room, size, err)
			}
			if requests, bytes, _ := s.admission.inflight(); requests != 1 || bytes != int64(full)+int64(size) {
				t.Errorf("room %d: %d requests of %d bytes are counted, expected one of %d", room, requests, bytes-int64(full), size)
			}
			s.leaveEarly(request) // it has none any more
			s.admission.leave(conn, shareLargeWrites, size)
			if requests, bytes, _ := s.admission.inflight(); requests != 0 || bytes != int64(full) || conn.bytes(shareLargeWrites) != 0 {
				t.Errorf("room %d, size %d: %d requests of %d bytes are counted at the end, %d for the connection", room, size, requests, bytes-int64(full), conn.bytes(shareLargeWrites))
			}
		}
	}
}
