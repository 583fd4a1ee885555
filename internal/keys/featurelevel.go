package keys

import "encoding/binary"

// FeatureLevel is a set of format features that a store may write. A program reads every level up to the newest
// that it knows, and refuses a store above it. A store is created at the newest level; an older store stays at
// its level until an operator raises it, so that the program that wrote it before can open it again.
type FeatureLevel uint8

const (
	// FeatureLevelOldest is the level of stores without a level: data file 4, log segments of version 1.
	FeatureLevelOldest FeatureLevel = 1
	// FeatureLevelHistory adds what tells histories apart: data file 5 with a lineage, log segments of version 2.
	FeatureLevelHistory FeatureLevel = 2
	// FeatureLevelNewest is the newest level that this program knows.
	FeatureLevelNewest = FeatureLevelHistory
)

// SystemFeatureLevel is the key in SpaceSystem with the level to which the store was raised. A store that was
// created at its level does not have it.
const SystemFeatureLevel = "f"

// featureLevelBytes is the length of a level as a value.
const featureLevelBytes = 4

// AppendFeatureLevel appends the value of SystemFeatureLevel.
func AppendFeatureLevel(dst []byte, l FeatureLevel) []byte {
	return binary.LittleEndian.AppendUint32(dst, uint32(l))
}

// ReadFeatureLevel reads a value of SystemFeatureLevel. A level of another form is newer than any that is known.
func ReadFeatureLevel(value []byte) FeatureLevel {
	if len(value) != featureLevelBytes {
		return FeatureLevelNewest + 1
	}
	return FeatureLevel(min(binary.LittleEndian.Uint32(value), uint32(FeatureLevelNewest)+1))
}
