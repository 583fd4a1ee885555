package cache

import (
	"fmt"
	"os"
	"strconv"
	"testing"
)

// entries is the size of every cache; EPOCHKV_CACHE_ENTRIES overrides it.
func entries() int {
	if n, err := strconv.Atoi(os.Getenv("EPOCHKV_CACHE_ENTRIES")); err == nil {
		return n
	}
	return 4_000
}

// The bound of how far our share of hits may be below otter's in one run: otter itself varies by this much from run to run.
const behind = 0.5

// TestHitRatiosReachThoseOfOtter prints the share of hits at equal entries. The scan together with the Zipf mix runs once with the hint that the engine
// gives a scan, and once with none, as otter knows none.
func TestHitRatiosReachThoseOfOtter(t *testing.T) {
	n := entries()
	for _, tr := range traces {
		line, got := fmt.Sprintf("%-42s", tr.name), map[string]float64{}
		for _, arm := range arms {
			c, err := arm.open(n)
			if err != nil {
				t.Fatal(err)
			}
			got[arm.name] = tr.run(c, n, 1).percent()
			if err := c.close(); err != nil {
				t.Fatal(err)
			}
			line += fmt.Sprintf("  %s %.1f", arm.name, got[arm.name])
		}
		t.Log(line)
		if got["usage count"] < got["otter"]-behind {
			t.Errorf("%s: %.2f %% hits, otter %.2f %%", tr.name, got["usage count"], got["otter"])
		}
	}
}
