package server

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
)

// TestAPageIsEncodedAsItsMessage: with the same bytes as the generated code, whatever its fields are.
func TestAPageIsEncodedAsItsMessage(t *testing.T) {
	seed := testseed.Base(t)
	random := rand.New(rand.NewPCG(seed, 0))
	number := func() uint64 { return random.Uint64() >> random.IntN(65) }
	text := func(most int) []byte {
		return bytes.Repeat([]byte{byte(random.IntN(256))}, random.IntN(1+random.IntN(most)))
	}
	var page scanEncoding
	for range 500 {
		const pageBytes = 16 << 10
		page.reuse(pageBytes)
		want := &pb.ScanResponse{ReadEpoch: number(), ResumeToken: text(200)}
		for range random.IntN(50) {
			e := &pb.Entry{Key: text(300), Value: text(3000), Epoch: number(), ExpiresAtMs: number(), LeaseId: number()}
			want.Entries = append(want.Entries, e)
			page.add(e.Key, e.Value, keys.Epoch(e.Epoch), &mvcc.Metadata{ExpiresAt: e.ExpiresAtMs, Lease: e.LeaseId}, pageBytes)
		}
		want.Count = uint64(len(want.Entries))
		page.end(keys.Epoch(want.ReadEpoch), want.ResumeToken)
		encoded, err := want.MarshalVT()
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, page.SizeVT())
		if n, err := page.MarshalToSizedBufferVT(got); err != nil || n != len(got) || !bytes.Equal(got, encoded) {
			t.Fatalf("%v is encoded as %x, want %x", want, got, encoded)
		}
	}
}

// TestAPageDoesNotKeepTheBufferOfALargeValue: the next large value would be in memory beside it.
func TestAPageDoesNotKeepTheBufferOfALargeValue(t *testing.T) {
	const pageBytes = 16 << 10
	var page scanEncoding
	page.add([]byte("k"), make([]byte, pageBytes/2), 1, new(mvcc.Metadata), pageBytes)
	before := cap(page.buf)
	if page.reuse(pageBytes); cap(page.buf) != before || page.SizeVT() != 0 || page.count != 0 {
		t.Errorf("a buffer of %d bytes has %d when it is used again, and %d entries", before, cap(page.buf), page.count)
	}
	page.add([]byte("k"), make([]byte, 4*pageBytes), 1, new(mvcc.Metadata), pageBytes)
	if page.reuse(pageBytes); cap(page.buf) > 2*pageBytes {
		t.Errorf("a buffer of %d bytes is kept", cap(page.buf))
	}
}

// TestUnreadScansTakeWhatTheyCount: scans whose client opens no window, and that have sent what the transport takes, have no more of the heap than
// they are admitted with, and a session, however small their entries and pages are.
func TestUnreadScansTakeWhatTheyCount(t *testing.T) {
	testseed.SkipUnderRace(t) // it measures memory
	const (
		session = 32 << 10 // with stream, cursor and tables
		waits   = 50 * time.Millisecond
	)
	for _, test := range []struct{ pageBytes, scans int }{{4 << 10, 200}, {16 << 10, 100}, {0, 12}} {
		t.Run(fmt.Sprint("pages of ", test.pageBytes), func(t *testing.T) {
			h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = 64 * config.MiB })
			for i := range byte(40) {
				m := new(pb.BatchWriteRequest)
				for j := range 1000 {
					m.Mutations = append(m.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte{i, byte(j >> 8), byte(j)}})
				}
				if _, err := h.kv.BatchWrite(testContext(t), m); err != nil {
					t.Fatal(err)
				}
			}
			before := liveHeap()
			conn, err := net.Dial("tcp", h.Address())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			x := &exchange{framer: http2.NewFramer(conn, conn)}
			x.encoder = hpack.NewEncoder(&x.block)
			_, _ = io.WriteString(conn, http2.ClientPreface)
			_ = x.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			request := grpcMessage(t, &pb.ScanRequest{PageBytes: uint32(test.pageBytes)})
			for i := range uint32(test.scans) {
				x.open(2*i+1, "/epochkv.v1.KVService/Scan", false)
				x.data(2*i+1, true, request)
			}
			eventually(t, "all scans wait for their client", func() bool {
				waiting := 0
				for _, s := range h.snapshotList(t) {
					if s.Kind == pb.SnapshotInfo_KIND_SCAN && s.Idle != nil && s.Idle.AsDuration() >= waits {
						waiting++
					}
				}
				return waiting == test.scans
			})
			took := (liveHeap() - before) / int64(test.scans)
			_, counted, _ := h.admission.inflight()
			if counted /= int64(test.scans); took > counted+session {
				t.Errorf("a scan takes %d bytes, and counts %d", took, counted)
			}
		})
	}
}
