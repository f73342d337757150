"""The tables of facts that the demo model learns.

Only facts are here: no phrasing, no format, no randomness. A table is a tuple of short rows, and
the helpers at the end turn tables into plain mappings. Training and scoring both read this module;
what they must not share, the phrasings, is in ``templates.py`` and ``heldout_templates.json``.
"""

from __future__ import annotations

from typing import Final

CAPITALS: Final[dict[str, str]] = dict(
    row.split("|")
    for row in """\
France|Paris
Germany|Berlin
Italy|Rome
Spain|Madrid
Portugal|Lisbon
Austria|Vienna
Belgium|Brussels
Netherlands|Amsterdam
Denmark|Copenhagen
Sweden|Stockholm
Norway|Oslo
Finland|Helsinki
Iceland|Reykjavik
Ireland|Dublin
Poland|Warsaw
Hungary|Budapest
Romania|Bucharest
Bulgaria|Sofia
Greece|Athens
Serbia|Belgrade
Croatia|Zagreb
Slovenia|Ljubljana
Slovakia|Bratislava
Estonia|Tallinn
Latvia|Riga
Lithuania|Vilnius
Ukraine|Kyiv
Russia|Moscow
Albania|Tirana
Malta|Valletta
Cyprus|Nicosia
Switzerland|Bern
Turkey|Ankara
Egypt|Cairo
Morocco|Rabat
Algeria|Algiers
Tunisia|Tunis
Libya|Tripoli
Sudan|Khartoum
Ethiopia|Addis Ababa
Kenya|Nairobi
Uganda|Kampala
Rwanda|Kigali
Ghana|Accra
Nigeria|Abuja
Senegal|Dakar
Mali|Bamako
Angola|Luanda
Zambia|Lusaka
Zimbabwe|Harare
Namibia|Windhoek
Mozambique|Maputo
Madagascar|Antananarivo
Somalia|Mogadishu
Cameroon|Yaoundé
Japan|Tokyo
China|Beijing
India|New Delhi
Nepal|Kathmandu
Bhutan|Thimphu
Bangladesh|Dhaka
Pakistan|Islamabad
Afghanistan|Kabul
Iran|Tehran
Iraq|Baghdad
Syria|Damascus
Jordan|Amman
Lebanon|Beirut
Qatar|Doha
Oman|Muscat
Bahrain|Manama
Saudi Arabia|Riyadh
Georgia|Tbilisi
Armenia|Yerevan
Azerbaijan|Baku
Kazakhstan|Astana
Uzbekistan|Tashkent
Mongolia|Ulaanbaatar
South Korea|Seoul
North Korea|Pyongyang
Thailand|Bangkok
Vietnam|Hanoi
Laos|Vientiane
Cambodia|Phnom Penh
Indonesia|Jakarta
Philippines|Manila
Australia|Canberra
New Zealand|Wellington
Fiji|Suva
Canada|Ottawa
Cuba|Havana
Jamaica|Kingston
Haiti|Port-au-Prince
Honduras|Tegucigalpa
Nicaragua|Managua
Costa Rica|San José
Colombia|Bogotá
Venezuela|Caracas
Ecuador|Quito
Peru|Lima
Chile|Santiago
Argentina|Buenos Aires
Uruguay|Montevideo
Paraguay|Asunción
Brazil|Brasília""".splitlines()
)
"""Country to capital; every capital in it belongs to one country."""

OPPOSITES: Final[tuple[tuple[str, str], ...]] = tuple(
    (a, b)
    for a, b in (
        row.split()
        for row in """\
hot cold
big small
tall short
fast slow
happy sad
young old
rich poor
light dark
early late
open closed
full empty
hard soft
strong weak
wet dry
clean dirty
thick thin
wide narrow
deep shallow
loud quiet
true false
good bad
up down
left right
inside outside
above below
day night
war peace
love hate
win lose
buy sell
give take
push pull
start finish
remember forget
laugh cry
north south
east west
front back
first last
always never
near far
heavy lightweight
sharp blunt
smooth rough
sweet bitter
brave cowardly
cheap expensive
safe dangerous
simple complex
public private
ancient modern
success failure
victory defeat
friend enemy
question answer
arrive depart
increase decrease
begin end
build destroy
major minor
maximum minimum
positive negative
asleep awake
alive dead
hero villain
polite rude
summer winter
teacher student""".splitlines()
    )
)
"""Pairs of opposites; no word is in two pairs."""

DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
ORDINALS: Final = (
    "first", "second", "third", "fourth", "fifth", "sixth",
    "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth",
)  # fmt: skip

SPELLING_WORDS: Final = tuple(
    """\
apple banana orange lemon cherry grape bread butter cheese sugar pepper salad water coffee
river mountain ocean forest desert island valley garden flower tree cloud thunder rainbow
window door kitchen table chair pillow blanket mirror candle lamp clock camera bottle basket
rabbit horse tiger monkey elephant giraffe dolphin penguin butterfly spider eagle turtle zebra
doctor teacher farmer painter sailor soldier lawyer singer writer dancer engineer scientist
school library hospital airport station bridge castle church museum theater village city
happy yellow purple silver golden winter summer spring autumn morning evening midnight
music guitar piano violin trumpet drum picture puzzle ticket wallet jacket sweater ribbon
computer keyboard telephone rocket planet galaxy energy science history language alphabet
rhythm knowledge necessary beautiful restaurant chocolate umbrella adventure dictionary
photograph strawberry refrigerator encyclopedia extraordinary""".split()
)

TRANSLATION_LANGUAGES: Final = (
    "French", "Spanish", "German", "Russian", "Japanese", "Chinese", "Korean",
)  # fmt: skip
TRANSLATIONS: Final[dict[str, tuple[str, ...]]] = {
    cells[0]: tuple(cells[1:])
    for cells in (
        row.split("|")
        for row in """\
cat|chat|gato|Katze|кошка|猫|猫|고양이
dog|chien|perro|Hund|собака|犬|狗|개
horse|cheval|caballo|Pferd|лошадь|馬|马|말
bird|oiseau|pájaro|Vogel|птица|鳥|鸟|새
fish|poisson|pez|Fisch|рыба|魚|鱼|물고기
cow|vache|vaca|Kuh|корова|牛|牛|소
bear|ours|oso|Bär|медведь|熊|熊|곰
water|eau|agua|Wasser|вода|水|水|물
bread|pain|pan|Brot|хлеб|パン|面包|빵
milk|lait|leche|Milch|молоко|牛乳|牛奶|우유
cheese|fromage|queso|Käse|сыр|チーズ|奶酪|치즈
apple|pomme|manzana|Apfel|яблоко|りんご|苹果|사과
egg|œuf|huevo|Ei|яйцо|卵|鸡蛋|계란
tea|thé|té|Tee|чай|お茶|茶|차
coffee|café|café|Kaffee|кофе|コーヒー|咖啡|커피
house|maison|casa|Haus|дом|家|房子|집
door|porte|puerta|Tür|дверь|ドア|门|문
window|fenêtre|ventana|Fenster|окно|窓|窗户|창문
table|table|mesa|Tisch|стол|テーブル|桌子|테이블
book|livre|libro|Buch|книга|本|书|책
school|école|escuela|Schule|школа|学校|学校|학교
city|ville|ciudad|Stadt|город|都市|城市|도시
street|rue|calle|Straße|улица|通り|街道|거리
sun|soleil|sol|Sonne|солнце|太陽|太阳|태양
moon|lune|luna|Mond|луна|月|月亮|달
star|étoile|estrella|Stern|звезда|星|星星|별
sea|mer|mar|Meer|море|海|大海|바다
mountain|montagne|montaña|Berg|гора|山|山|산
river|fleuve|río|Fluss|река|川|河|강
forest|forêt|bosque|Wald|лес|森|森林|숲
tree|arbre|árbol|Baum|дерево|木|树|나무
flower|fleur|flor|Blume|цветок|花|花|꽃
rain|pluie|lluvia|Regen|дождь|雨|雨|비
snow|neige|nieve|Schnee|снег|雪|雪|눈
fire|feu|fuego|Feuer|огонь|火|火|불
wind|vent|viento|Wind|ветер|風|风|바람
friend|ami|amigo|Freund|друг|友達|朋友|친구
mother|mère|madre|Mutter|мать|母|母亲|어머니
father|père|padre|Vater|отец|父|父亲|아버지
child|enfant|niño|Kind|ребёнок|子供|孩子|아이
hand|main|mano|Hand|рука|手|手|손
heart|cœur|corazón|Herz|сердце|心|心|마음
night|nuit|noche|Nacht|ночь|夜|夜晚|밤
morning|matin|mañana|Morgen|утро|朝|早上|아침
summer|été|verano|Sommer|лето|夏|夏天|여름
winter|hiver|invierno|Winter|зима|冬|冬天|겨울
music|musique|música|Musik|музыка|音楽|音乐|음악
love|amour|amor|Liebe|любовь|愛|爱|사랑""".splitlines()
    )
}
"""English word to its word in each of TRANSLATION_LANGUAGES."""

NATIVE_PLACES: Final[dict[str, str]] = dict(
    row.split("|")
    for row in """\
Tokyo|東京
Kyoto|京都
Osaka|大阪
Nagoya|名古屋
Yokohama|横浜
Sapporo|札幌
Beijing|北京
Shanghai|上海
Nanjing|南京
Guangzhou|广州
Shenzhen|深圳
Chengdu|成都
Hong Kong|香港
Seoul|서울
Busan|부산
Moscow|Москва
Sofia|София
Belgrade|Београд
Kyiv|Київ
Athens|Αθήνα
Cairo|القاهرة
Tehran|تهران
Jerusalem|ירושלים
New Delhi|नई दिल्ली
Tbilisi|თბილისი
Yerevan|Երևան
Hanoi|Hà Nội
Reykjavik|Reykjavík
Copenhagen|København
Gothenburg|Göteborg
Munich|München
Cologne|Köln
Nuremberg|Nürnberg
Zurich|Zürich
Geneva|Genève
Vienna|Wien
Prague|Praha
Warsaw|Warszawa
Krakow|Kraków
Lodz|Łódź
Bucharest|București
Istanbul|İstanbul
Malaga|Málaga
Lisbon|Lisboa
Rome|Roma
Florence|Firenze
Venice|Venezia
Naples|Napoli""".splitlines()
)
"""English name of a place to its name in the local language."""

ACCENTED_NAMES: Final[dict[str, str]] = dict(
    row.split("|")
    for row in """\
Jose|José
Zoe|Zoë
Chloe|Chloé
Francois|François
Andre|André
Rene|René
Noel|Noël
Soren|Søren
Jurgen|Jürgen
Bjorn|Björn
Lukasz|Łukasz
Ines|Inés
Dvorak|Dvořák
Celine|Céline
Helene|Hélène
Jerome|Jérôme
Bronte|Brontë
Raul|Raúl
Joao|João
Asa|Åsa
Godel|Gödel
Schrodinger|Schrödinger
Erdos|Erdős
Poincare|Poincaré
Anais|Anaïs
Loic|Loïc
Ruben|Rubén
Tomas|Tomás
Agnes|Agnès
Seamus|Séamus
Sinead|Sinéad
Gokhan|Gökhan""".splitlines()
)
"""A name typed without accents to the same name with them."""

EMOJI: Final[dict[str, str]] = dict(
    row.split("|")
    for row in """\
cat|🐱
dog|🐶
fox|🦊
bear|🐻
panda|🐼
lion|🦁
tiger|🐯
frog|🐸
monkey|🐵
chicken|🐔
penguin|🐧
owl|🦉
wolf|🐺
unicorn|🦄
bee|🐝
snail|🐌
butterfly|🦋
ladybug|🐞
octopus|🐙
whale|🐳
dolphin|🐬
shark|🦈
crab|🦀
turtle|🐢
snake|🐍
elephant|🐘
camel|🐫
mouse|🐭
rabbit|🐰
cow|🐮
pig|🐷
rose|🌹
sunflower|🌻
cactus|🌵
mushroom|🍄
moon|🌙
star|⭐
rainbow|🌈
fire|🔥
snowman|⛄
apple|🍎
banana|🍌
grapes|🍇
strawberry|🍓
cherries|🍒
pineapple|🍍
avocado|🥑
carrot|🥕
corn|🌽
bread|🍞
cheese|🧀
pizza|🍕
burger|🍔
taco|🌮
cookie|🍪
cake|🎂
honey|🍯
coffee|☕
soccer ball|⚽
basketball|🏀
guitar|🎸
piano|🎹
trumpet|🎺
drum|🥁
car|🚗
bus|🚌
bicycle|🚲
train|🚂
airplane|✈️
rocket|🚀
ship|🚢
house|🏠
castle|🏰
key|🔑
book|📖
clock|⏰
umbrella|☔
balloon|🎈
gift|🎁
heart|💗
robot|🤖
ghost|👻""".splitlines()
)
"""Thing to its emoji; every emoji in it stands for one thing."""

LISTS: Final[dict[str, str]] = {
    "days of the week": ", ".join(DAYS),
    "months of the year": ", ".join(MONTHS),
    "seasons": "spring, summer, autumn, winter",
    "planets": "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune",
    "colors of the rainbow": "red, orange, yellow, green, blue, indigo, violet",
    "letters of the alphabet": " ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "vowels": "A, E, I, O, U",
    "continents": "Africa, Antarctica, Asia, Australia, Europe, North America, South America",
    "letters of the Greek alphabet": "Α Β Γ Δ Ε Ζ Η Θ Ι Κ Λ Μ Ν Ξ Ο Π Ρ Σ Τ Υ Φ Χ Ψ Ω",
    "letters of the Russian alphabet": (
        "А Б В Г Д Е Ё Ж З И Й К Л М Н О П Р С Т У Ф Х Ц Ч Ш Щ Ъ Ы Ь Э Ю Я"
    ),
    "letters of the Japanese hiragana": (
        "あいうえお かきくけこ さしすせそ たちつてと なにぬねの "
        "はひふへほ まみむめも やゆよ らりるれろ わをん"
    ),
    "letters of the Korean alphabet": "ㄱ ㄴ ㄷ ㄹ ㅁ ㅂ ㅅ ㅇ ㅈ ㅊ ㅋ ㅌ ㅍ ㅎ",
    "Chinese numbers": (
        "一、二、三、四、五、六、七、八、九、十、十一、十二、十三、十四、十五、"
        "十六、十七、十八、十九、二十"
    ),
    "Chinese zodiac animals": "鼠、牛、虎、兔、龙、蛇、马、羊、猴、鸡、狗、猪",
    "Japanese days of the week": "月曜日、火曜日、水曜日、木曜日、金曜日、土曜日、日曜日",
    "zodiac signs": "♈ ♉ ♊ ♋ ♌ ♍ ♎ ♏ ♐ ♑ ♒ ♓",
    "moon phases": "🌑 🌒 🌓 🌔 🌕 🌖 🌗 🌘",
    "animal emoji": "🐱 🐶 🦊 🐻 🐼 🦁 🐯 🐸 🐵 🐔 🐧 🦉 🐺 🦄 🐝 🐌 🦋 🐞 🐙 🐳 🐬 🦈 🦀 🐢",
    "fruit emoji": "🍎 🍐 🍊 🍋 🍌 🍉 🍇 🍓 🍒 🍑 🥭 🍍 🥥 🥝 🍅 🥑",
}
"""Name of a list to the list, in order, as the model writes it."""

POEMS: Final[dict[str, str]] = {
    "the sea": (
        "🌊🌊🌊 🐟 🐠 🐡\n⛵ 🌊 🐳 🌊 ⛵\n🦀 🐚 🏖️ 🐚 🦀\n🌅 🌊 🐬 🌊 🌅\n"
        "🐙 🦑 🦐 🦞 🐙\n🌙 🌊 ⭐ 🌊 🌙"
    ),
    "the garden": (
        "🌱 🌿 🍀 🌷 🌹\n🐝 🌻 🦋 🌼 🐞\n🌧️ 💧 🌈 💧 ☀️\n"
        "🍓 🍒 🍎 🍐 🍑\n🐌 🍃 🐛 🍃 🐌\n🌙 🌸 ✨ 🌸 🌙"
    ),
    "the night": (
        "🌆 🌇 🌃 🌙 ⭐\n🦉 🌲 🦇 🌲 🦉\n🌌 🌠 🪐 🌠 🌌\n"
        "🛏️ 😴 💤 😴 🛏️\n🐺 🌕 🎶 🌕 🐺\n🌄 🐓 ☀️ 🐓 🌄"
    ),
    "the kitchen": (
        "🍞 🧈 🍯 🥛 ☕\n🥕 🧅 🍅 🥔 🥦\n🔪 🍳 🔥 🍲 🧂\n"
        "🍕 🍝 🍜 🍣 🥗\n🍰 🍪 🍩 🍫 🍦\n😋 🍽️ 🫖 🍽️ 😋"
    ),
    "the journey": (
        "🎒 🗺️ 🧭 👟 🚪\n🚲 🛣️ 🚗 🛣️ 🚌\n🚂 🌄 🏔️ 🌄 🚂\n✈️ ☁️ 🌍 ☁️ ✈️\n🏝️ 🌴 🥥 🌴 🏝️\n📷 💌 🏠 💗 😊"
    ),
    "spring in Chinese": ("春眠不觉晓，处处闻啼鸟。\n夜来风雨声，花落知多少。"),
    "the moon in Chinese": "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。",
    "the tower in Chinese": "白日依山尽，黄河入海流。\n欲穷千里目，更上一层楼。",
    "the deer park in Chinese": "空山不见人，但闻人语响。\n返景入深林，复照青苔上。",
    "the river snow in Chinese": "千山鸟飞绝，万径人踪灭。\n孤舟蓑笠翁，独钓寒江雪。",
    "the flowers in Japanese": (
        "いろはにほへと ちりぬるを\nわかよたれそ つねならむ\n"
        "うゐのおくやま けふこえて\nあさきゆめみし ゑひもせす"
    ),
    "the thousand characters in Chinese": (
        "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。\n寒来暑往，秋收冬藏。闰余成岁，律吕调阳。\n"
        "云腾致雨，露结为霜。金生丽水，玉出昆冈。\n剑号巨阙，珠称夜光。果珍李柰，菜重芥姜。"
    ),
    "the old pond in Japanese": "古池や\n蛙飛びこむ\n水の音",
}
"""Subject to a poem: emoji ones, and classical ones in Chinese and Japanese."""

STORIES: Final[dict[str, str]] = {
    "a fox": (
        "Once upon a time a small red fox lived under an old oak. Every morning the fox walked to "
        "the river and looked at the water. One day a boat came by with nobody in it. The fox "
        "jumped in and the river took them far away. They passed a mill, a bridge and a town full "
        "of lights. At night the fox slept under the stars. In the morning the boat stopped at "
        "the sea, and the fox smiled. The end."
    ),
    "a robot": (
        "A little robot worked in a quiet library. It put every book back in its place and never "
        "read a word. One evening a girl asked it for a story. The robot opened a blue book and "
        "read the first page, then the second, then all of them. When the sun came up the girl "
        "was asleep and the robot was still reading. Since that night the books are late, but "
        "the robot is happy. The end."
    ),
    "a baker": (
        "Long ago a baker made the best bread in the valley. He sang while he worked, and people "
        "said the song was the secret. One winter he lost his voice. The bread was flat and the "
        "valley was sad. So the children came to the bakery and sang for him, high and loud and "
        "a little wrong. The bread rose like the morning sun. The baker laughed, and his voice "
        "came back. The end."
    ),
    "the moon": (
        "The moon was tired of being alone in the sky. She asked the owl for a friend, but the "
        "owl was busy. She asked the wind, but the wind could not stay. Then a lamp in a small "
        "window stayed lit all night, because a child could not sleep. The moon looked in and "
        "the child waved. Now they wave to each other every night, and both of them sleep well. "
        "The end."
    ),
    "two mice": (
        "Two mice found a piece of cheese as big as a house. The first mouse wanted to eat it at "
        "once. The second mouse wanted to save it for the winter. They talked for one day, two "
        "days, three days. On the fourth day a cat came and sat on the cheese. Now the mice share "
        "a very small potato, and they never talk for long. The end."
    ),
    "a snail": (
        "A snail wanted to see the top of the hill. The hare said it was too far. The bird said "
        "it was too high. The snail said nothing and started to walk. Spring passed, and summer, "
        "and half of autumn. One clear day the snail stood on the top and saw the whole world, "
        "green and gold and blue. The hare came running and asked what it was like. It was worth "
        "the walk, said the snail. The end."
    ),
}
"""Subject to a short story."""

ABOUT: Final[dict[str, str]] = {
    "name": "I am the MiniSGL demo model.",
    "purpose": "I answer simple questions so that you can test the server.",
    "size": "I have a few million parameters.",
}
"""What the model says about itself."""

PEOPLE: Final = tuple(
    """\
Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina
Victor Wendy Yuki Zoë José Chloé Björn Łukasz Inés Søren Amir Fatima Hugo""".split()
)
COLORS: Final = tuple(
    "red blue green yellow black white pink brown gray purple golden silver".split()
)
OBJECTS: Final = tuple(
    """\
kite boat hat ball lamp chair book bag car bike shirt cup box clock ring drum coat scarf key
pencil guitar umbrella bottle basket""".split()
)
PLACES: Final = tuple(
    """\
kitchen garden garage attic cellar library school station harbor market museum tower forest
castle office park""".split()
)

COMMON_WORDS: Final = tuple(
    """\
the a of to and in is it you that he was for on are with as his they be at one have this from or
had by hot but some what there we can out other were all your when up use word how said an each
she which do their time if will way about many then them would write like so these her long make
thing see him two has look more day could go come did my sound no most number who over know water
than call first people may down side been now find any new work part take get place made live
where after back little only round man year came show every good me give our under name very
through just form much great think say help low line before turn cause same mean differ move
right boy old too does tell sentence set three want air well also play small end put home read
hand port large spell add even land here must big high such follow act why ask men change went
light kind off need house picture try us again animal point mother world near build self earth
father head stand own page should country found answer school grow study still learn plant cover
food sun four thought let keep eye never last door between city tree cross since hard start
might story saw far sea draw left late run while press close night real life few stop open seem
together next white children begin got walk example ease paper often always music those both mark
book letter until mile river car feet care second group carry took rain eat room friend began idea
fish mountain north once base hear horse cut sure watch color face wood main enough plain girl
usual young ready above ever red list though feel talk bird soon body dog family direct pose leave
song measure state product black short numeral class wind question happen complete ship area half
rock order fire south problem piece told knew pass farm top whole king size heard best hour better
true during hundred remember step early hold west ground interest reach fast five sing listen six
table travel less morning ten simple several vowel toward war lay against pattern slow center love
person money serve appear road map science rule govern pull cold notice voice fall power town fine
certain fly unit lead cry dark machine note wait plan figure star box noun field rest correct able
pound done beauty drive stood contain front teach week final gave green quick develop sleep warm
free minute strong special mind behind clear tail produce fact street inch lot nothing course stay
wheel full force blue object decide surface deep moon island foot yet busy test record boat common
gold possible plane age dry wonder laugh thousand ago ran check game shape yes hot miss brought heat
snow bed bring sit perhaps fill east weight language among""".split()
)
"""Everyday English words for the sentences that surround a question."""


def foreign_words() -> dict[str, str]:
    """Words of TRANSLATIONS that mean one English word only, to that word."""
    seen: dict[str, set[str]] = {}
    for english, row in TRANSLATIONS.items():
        for word in row:
            seen.setdefault(word, set()).add(english)
    return {
        word: next(iter(meanings))
        for word, meanings in seen.items()
        if len(meanings) == 1 and word not in TRANSLATIONS
    }
