package memtable

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// TestAnnouncedInsertsFindTheirPlaceAfterSplits announces lone operations of several writers and applies
// them in another order: what Announce found is split, passed by the splices of others, or the same key.
func TestAnnouncedInsertsFindTheirPlaceAfterSplits(t *testing.T) {
	const writers = 40
	for name, shape := range windowShapes {
		t.Run(name, func(t *testing.T) {
			rnd := seeded(t)(0)
			tab := mustNew(t, Config{Bytes: 8 << 20, Prefix: []byte("p")})
			ins, builders, values := make([]Inserter, writers), make([]batch.Builder, writers), make([]string, writers)
			want, made, epoch := map[string]string{}, 0, keys.Epoch(0)
			for made < 8_000 {
				for i := range ins {
					key := shape(rnd, made)
					builders[i].Reset()
					values[i] = fmt.Sprint(made)
					builders[i].Set(keys.SpaceOf(key), keys.User(key), []byte(values[i]))
					made++
					mustAnnounce(t, tab, &ins[i], &builders[i])
				}
				for _, i := range rand.New(rand.NewPCG(uint64(made), 0)).Perm(writers) {
					epoch++
					applyAll(t, tab, &ins[i], &builders[i], epoch)
					want[string(builders[i].Key(0))] = values[i]
				}
			}
			if tab.Count() != len(want) || tab.Versions() != made {
				t.Errorf("%d keys and %d versions, want %d and %d", tab.Count(), tab.Versions(), len(want), made)
			}
			checkHolds(t, tab, want)
		})
	}
}

func mustAnnounce(t *testing.T, tab *Table, in *Inserter, b *batch.Builder) {
	t.Helper()
	body, err := b.Finish()
	if err == nil {
		err = tab.Secure(in, MaxSize(body))
	}
	if err != nil {
		t.Fatal(err)
	}
	tab.Announce(in, body)
}

// TestRecordsFindTheirPlaceBesideOtherKeys commits pairs of a record and a key by several writers. The records count on
// with the time, nearly in order, and now and then an old one comes. The heads tell them apart, or do not.
func TestRecordsFindTheirPlaceBesideOtherKeys(t *testing.T) {
	const writers = 4
	expected := &Expected{Prefix: []byte("aqcd"), Bytes: []ByteRange{{Most: 1}, {Most: 255}, {Most: 255}}}
	for name, e := range map[string]*Expected{"expected": expected, "equal heads": nil} {
		t.Run(name, func(t *testing.T) {
			rnd := seeded(t)(0)
			tab := mustNew(t, Config{Bytes: 8 << 20, Prefix: []byte("p"), Expected: e})
			ins, builders := make([]Inserter, writers), make([]batch.Builder, writers)
			want, pairs := map[string]string{}, 0
			for pairs < 8_000 {
				for i := range ins {
					at := pairs + rnd.IntN(40)
					if rnd.IntN(50) == 0 {
						at = rnd.IntN(pairs + 1)
					}
					record := fmt.Appendf([]byte("aqcd"), "%s-%d", binary.BigEndian.AppendUint32(nil, uint32(at)<<8)[:3], pairs)
					key, value := binary.BigEndian.AppendUint64([]byte("p"), rnd.Uint64()), fmt.Sprint(pairs)
					builders[i].Reset()
					builders[i].Set(keys.SpaceOf(record), keys.User(record), []byte(value))
					builders[i].Set(keys.SpaceOf(key), keys.User(key), []byte(value))
					want[string(record)], want[string(key)] = value, value
					pairs++
					mustAnnounce(t, tab, &ins[i], &builders[i])
				}
				for _, i := range rnd.Perm(writers) {
					applyAll(t, tab, &ins[i], &builders[i], keys.Epoch(pairs+i))
				}
			}
			if tab.Count() != len(want) {
				t.Errorf("%d keys, want %d", tab.Count(), len(want))
			}
			checkHolds(t, tab, want)
		})
	}
}
