package engines

import (
	"bytes"
	"fmt"
	"testing"
)

func TestEveryEngineReadsBackWhatItWrote(t *testing.T) {
	for name, open := range map[string]Open{"epochkv": EpochKV, "pebble": Pebble, "badger": Badger, "bbolt": Bbolt} {
		for _, sync := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/sync=%t", name, sync), func(t *testing.T) {
				o := Options{Dir: t.TempDir(), Sync: sync, BufferBytes: 8 << 20}
				e, err := open(o)
				if err != nil {
					t.Fatal(err)
				}
				s, err := e.Session()
				if err != nil {
					t.Fatal(err)
				}
				if err := s.Put([]byte("a"), []byte("1")); err != nil {
					t.Fatal(err)
				}
				if err := s.PutAll([][]byte{[]byte("b"), []byte("c")}, [][]byte{[]byte("2"), []byte("3")}); err != nil {
					t.Fatal(err)
				}
				if err := e.Settle(); err != nil {
					t.Fatal(err)
				}
				for i, key := range []string{"a", "b", "c"} {
					v, found, err := s.Get([]byte("x"), []byte(key))
					if err != nil || !found || !bytes.Equal(v, fmt.Appendf(nil, "x%d", i+1)) {
						t.Errorf("get %s: %q, %t, %v", key, v, found, err)
					}
				}
				if _, found, err := s.Get(nil, []byte("d")); found || err != nil {
					t.Errorf("get of a missing key: %t, %v", found, err)
				}
				if n, err := s.Scan(nil, []byte("b"), 10); n != 2 || err != nil {
					t.Errorf("scan from b: %d entries, %v", n, err)
				}
				if n, err := s.Scan(nil, []byte("a"), 2); n != 2 || err != nil {
					t.Errorf("scan of 2: %d entries, %v", n, err)
				}
				if err := s.Close(); err != nil {
					t.Error(err)
				}
				if err := e.Close(); err != nil {
					t.Error(err)
				}
			})
		}
	}
}
