package lease

import (
	"context"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// BenchmarkKeepAlive is of 100,000 leases; it must write nothing to the log.
func BenchmarkKeepAlive(b *testing.B) {
	h := mustOpen(b, vfs.NewMem(), Options{})
	defer h.stop()
	const leases = 100_000
	for id := ID(1); id <= leases; id++ {
		h.add(&entry{id: id, record: record{ttl: time.Hour}, index: notScheduled})
	}
	visible := h.store.Visible()
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		if _, err := h.KeepAlive(context.Background(), ID(i*7919%leases+1)); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	if h.store.Visible() != visible {
		b.Error("keep-alives have written")
	}
}
