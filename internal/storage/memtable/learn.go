package memtable

import (
	"bytes"
	"math"

	"github.com/epochkv/epochkv/internal/keys"
)

const (
	// sampleMax is how many keys heads are learned from. Reading them costs as many cache misses.
	sampleMax = 1024
	// sampleMin is the smallest sample that says something.
	sampleMin = 16
	// smallestGroup is the part of the sample, as one over it, below which keys get no group.
	smallestGroup = 64
	// resolvedShare of neighbours in the sample with heads far enough apart is good enough.
	resolvedShare = 0.9
)

// LearnHeads computes heads that tell the table's keys apart, for a later table: the keys of an
// application look tomorrow as they do today. It returns nil if the table has too few keys. Writers
// may fill the table meanwhile.
func (t *Table) LearnHeads() *Heads {
	sample := t.sample()
	if len(sample) < sampleMin {
		return nil
	}
	return learnHeads(sample, t.Count(), t.expected)
}

// sample copies up to sampleMax keys, in order and about equally far apart: anchors of towers.
func (t *Table) sample() (sample [][]byte) {
	base, level := t.arena.base, 0
	for n := t.guide.towers.Load(); n > 2*sampleMax && level < int(t.height.Load())-1; n /= 2 {
		level++
	}
	var anchors []uint32
	for x := offsetIn(towerLink(base, t.first, level).Load()); x != 0; x = offsetIn(towerLink(base, x, level).Load()) {
		anchors = append(anchors, towerAnchor(base, x))
	}
	n := min(len(anchors), sampleMax)
	var ends []int
	var all []byte
	for i := range n {
		all = append(all, nodeKey(base, anchors[i*len(anchors)/n])...)
		ends = append(ends, len(all))
	}
	from := 0
	for _, end := range ends {
		sample = append(sample, all[from:end:end])
		from = end
	}
	return sample
}

// learner computes heads from a sample of keys.
type learner struct {
	first uint64 // of the heads
	heads uint64 // how many there are
	total int    // keys in the sample
	apart uint64 // how far apart the heads of neighbours in the sample should be: keys of the table are between them
}

// learnHeads computes heads for so many keys, from a sorted sample of them.
func learnHeads(sample [][]byte, population int, e *Expected) *Heads {
	before, rest := e.around(sample)
	apart := uint64(max(population/len(sample)/2, 1))
	return newHeads(e, func(after bool, first, size uint64) groupedHeads {
		part := before
		if after {
			part = rest
		}
		if len(part) < 2 {
			return plainGroup(nil, first, size)
		}
		l := learner{first: first, heads: size, total: len(part), apart: apart}
		return l.learn(part)
	})
}

func (l *learner) learn(sample [][]byte) groupedHeads {
	groups, _ := l.divide(sample, 0, groupsMax)
	common := groups[0].prefix
	for i := range groups {
		common = common[:commonPrefix(common, groups[i].prefix)]
	}
	h := groupedHeads{prefix: common, groups: groups}
	first := l.first
	for i := range groups {
		g := &groups[i]
		g.prefix = g.prefix[len(common):]
		g.first = first
		first += g.size
		h.words[i] = keys.WordAfter(g.prefix, 0)
	}
	return h
}

// divide makes groups of neighbouring keys whose common prefix has at least so many bytes, and
// returns how many pairs of neighbours their heads tell apart. It makes one group, unless more
// groups tell more apart: each then has the keys with one byte after the common prefix.
func (l *learner) divide(sample [][]byte, least, budget int) (groups []headGroup, resolved int) {
	common := commonPrefix(sample[0], sample[len(sample)-1])
	one := l.group(sample, least, common)
	resolved = l.resolved(&one, sample)
	groups = []headGroup{one}
	if float64(resolved) >= resolvedShare*float64(len(sample)-1) {
		return groups, resolved
	}
	runs := l.runs(sample, common)
	if len(runs) == 0 || len(runs) > budget {
		return groups, resolved
	}
	var parts []headGroup
	sum := 0
	for i, run := range runs {
		more, n := l.divide(run, common+1, budget-len(parts)-(len(runs)-1-i))
		parts, sum = append(parts, more...), sum+n
	}
	if sum <= resolved+len(sample)/20 {
		return groups, resolved
	}
	return parts, sum
}

// runs are the keys with each byte at an index, without those of which there are too few.
func (l *learner) runs(sample [][]byte, at int) (runs [][][]byte) {
	for i := 0; i < len(sample); {
		if len(sample[i]) <= at {
			i++
			continue
		}
		j := i
		for j < len(sample) && sample[j][at] == sample[i][at] {
			j++
		}
		if (j-i)*smallestGroup >= l.total && j-i > 1 {
			runs = append(runs, sample[i:j])
		}
		i = j
	}
	return runs
}

// resolved is how many pairs of neighbours have heads that are far enough apart.
func (l *learner) resolved(g *headGroup, sample [][]byte) (n int) {
	for i := 1; i < len(sample); i++ {
		a, b := g.head(sample[i-1][len(g.prefix):]), g.head(sample[i][len(g.prefix):])
		if uint64(b)-uint64(a) >= l.apart {
			n++
		}
	}
	return n
}

// group makes one group of all keys, which share common bytes; its prefix has at least so many.
func (l *learner) group(sample [][]byte, least, common int) headGroup {
	g := headGroup{size: l.heads * uint64(len(sample)) / uint64(l.total)}
	values := valuesAfter(sample, common)
	if whole(values) {
		g.prefix = bytes.Clone(sample[0][:common])
		return g
	}
	if before := common - 1; before >= least && sample[0][before] < math.MaxUint8 {
		common = before // the keys to come may count on into the byte before
		values = append([]byteValues{{least: sample[0][before], most: sample[0][before] + 1, some: true}}, values...)
	}
	number := false
	for i := range values {
		number = values[i].digits() && (number || values[i].least < values[i].most)
		values[i].widen(number)
	}
	g.prefix = bytes.Clone(sample[0][:common])
	g.choose(values)
	return g
}

// byteValues are the values of one byte in a sample.
type byteValues struct {
	least, most byte
	some        bool
}

func (v *byteValues) add(b byte) {
	if !v.some {
		*v = byteValues{b, b, true}
		return
	}
	v.least, v.most = min(v.least, b), max(v.most, b)
}

func isDigit(b byte) bool { return b >= '0' && b <= '9' }

func (v byteValues) digits() bool { return v.some && isDigit(v.least) && isDigit(v.most) }

// widen makes room for values that the sample lacks: a digit of a number that varies may be any
// digit; another byte that varies may vary more.
func (v *byteValues) widen(number bool) {
	switch span := int(v.most) - int(v.least); {
	case number:
		v.least, v.most = '0', '9'
	case span > 1:
		v.most = byte(min(int(v.most)+span+1, math.MaxUint8))
	}
}

// valuesAfter are the values of the bytes after the first skip ones.
func valuesAfter(sample [][]byte, skip int) []byteValues {
	values := make([]byteValues, placesMax)
	for _, k := range sample {
		for i := range min(len(k)-skip, placesMax) {
			values[i].add(k[skip+i])
		}
	}
	return values
}

// whole reports whether the first bytes take nearly all values, so that four of them make a head
// as good as any.
func whole(values []byteValues) bool {
	for _, v := range values[:4] {
		if v.most-v.least < 240 {
			return false
		}
	}
	return true
}

// choose divides the heads of the group by the values of as many bytes as they suffice for.
func (g *headGroup) choose(values []byteValues) {
	used := uint64(1)
	for _, v := range values {
		p := headPlace{least: v.least, span: v.most - v.least}
		left := g.size / used
		for uint64(p.span>>p.shift)+1 > left {
			p.shift++
		}
		if !v.some || left == 1 {
			break
		}
		g.places = append(g.places, p)
		used *= uint64(p.span>>p.shift) + 1
		if p.shift > 0 {
			break
		}
	}
	spread := g.size / used
	for i := len(g.places) - 1; i >= 0; i-- {
		p := &g.places[i]
		p.spread = spread
		spread *= uint64(p.span>>p.shift) + 1
	}
}

// commonPrefix is how many bytes two keys share at their beginning.
func commonPrefix(a, b []byte) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}
