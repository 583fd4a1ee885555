package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Size is a number of bytes that people write as 64KiB, 256MiB or 1GiB. It is a flag value.
type Size int64

// Binary units.
const (
	KiB Size = 1 << 10
	MiB Size = 1 << 20
	GiB Size = 1 << 30
	TiB Size = 1 << 40
)

var sizeUnits = []struct {
	suffix string
	factor Size
}{
	// Longer suffixes first: "b" ends all of them. Decimal units are refused on purpose: "64MB"
	// means 64,000,000 to one reader and 67,108,864 to the next.
	{"tib", TiB}, {"gib", GiB}, {"mib", MiB}, {"kib", KiB}, {"b", 1},
}

// ParseSize reads a whole number with an optional unit: B, KiB, MiB, GiB, TiB. Case and one space
// do not matter.
func ParseSize(text string) (Size, error) {
	number, factor := strings.ToLower(strings.TrimSpace(text)), Size(1)
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(number, u.suffix); ok {
			number, factor = strings.TrimSpace(rest), u.factor
			break
		}
	}
	n, err := strconv.ParseUint(number, 10, 63)
	if err != nil || Size(n) > math.MaxInt64/factor {
		return 0, fmt.Errorf("%q is not a size; write a whole number with B, KiB, MiB, GiB or TiB, such as 256MiB", text)
	}
	return Size(n) * factor, nil
}

// String writes the size with the largest unit that divides it.
func (s Size) String() string {
	for _, u := range []struct {
		name   string
		factor Size
	}{{"TiB", TiB}, {"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB}} {
		if s != 0 && s%u.factor == 0 {
			return strconv.FormatInt(int64(s/u.factor), 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10) + "B"
}

// Set implements pflag.Value.
func (s *Size) Set(text string) error {
	v, err := ParseSize(text)
	if err == nil {
		*s = v
	}
	return err
}

// Type implements pflag.Value.
func (s *Size) Type() string { return "size" }
