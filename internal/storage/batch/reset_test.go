package batch

import (
	"fmt"
	"runtime"
	"testing"
	"weak"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestResetKeepsNothingOfAHugeBatch, sorted or not: builders are pooled with their sessions.
func TestResetKeepsNothingOfAHugeBatch(t *testing.T) {
	for _, order := range []int{1, -1} {
		var b Builder
		for i := range 300_000 {
			b.Set(keys.SpaceUser, fmt.Appendf(nil, "%010d", 1_000_000+order*i), []byte("a value of some bytes"))
		}
		if _, err := b.Finish(); err != nil {
			t.Fatal(err)
		}
		buf, spans := weak.Make(&b.buf[0]), weak.Make(&b.spans[0])
		b.Reset()
		runtime.GC()
		if buf.Value() != nil || spans.Value() != nil {
			t.Errorf("order %d: the operations or their places are still in memory", order)
		}
		runtime.KeepAlive(&b)
	}
}
